"""The `omni` command."""

import argparse
import os
import signal
import sys
from importlib import import_module
from importlib.metadata import version

from infra.screen import show_as_it_can

_DESCRIPTION = """\
Train multimodal LLMs with encoders and LLM multiplexed on the same ranks.

  omni train experiment=quickstart         train; every key of the configuration may follow
  omni train --help                        configuration groups and all keys with their values
  omni resume runs/NAME                    go on with a run; with --fork FOLDER begin a stage with its weights
  omni plan --trace longtail cluster=h100 launch.ranks=64   time, MFU and memory of a step, without ranks
  omni compare --trace longtail cluster=h100 launch.ranks=8   published systems and ours side by side
  omni layout show layout.llm.tp=2         explain which ranks do what, draw them by an axis
  omni rehearse --dry --rank 1             measure any rank of any world, without the world
  omni calibrate --out conf/cluster/mine.yaml                   measure this machine, write a cluster file
  omni status runs/NAME                    what a run is doing, from its folder
  omni sweep show runs/NAME/TIME           the results of omni train -m as one table
  omni timeline runs/NAME --step 100       draw a recorded step of a run beside its simulation
  omni sync runs/NAME                      bring W&B level with a run folder, after the fact or once more
  omni eval runs/NAME                      held-out losses and transcriptions of a checkpoint
  omni generate runs/NAME --prompt TEXT    what the model of a checkpoint answers
  omni checkpoint verify runs/NAME         verify, show and export the checkpoints of a run
  omni parity reference -- candidate       compare loss, norms and every gradient of two configurations
  omni doctor experiment=quickstart        say what is wrong with this machine, and what to do
  omni data build --recipe quickstart      build, inspect and verify datasets; make traces
"""
_COMMANDS = {
    "train": "train a model",
    "resume": "go on with a run, or begin a stage of its own with its weights",
    "plan": "say what a step takes on a cluster, without ranks: time, MFU, memory, bytes, the plan",
    "compare": "simulate published systems and ours side by side, on the same samples and ranks",
    "layout": "explain the groups of a rank, draw all ranks by an axis",
    "rehearse": "run any rank of any world on fake tensors: memory and bytes sent",
    "calibrate": "measure this machine and write a cluster file",
    "status": "say what runs are doing, from their folders",
    "sweep": "show the results of a sweep as one table",
    "timeline": "draw a recorded step of a run, measured above simulated",
    "sync": "bring the W&B run of a run folder level with its metrics",
    "eval": "held-out losses and transcriptions of a checkpoint",
    "generate": "what the model of a checkpoint answers to texts and chats",
    "checkpoint": "verify, show and export the checkpoints of a run",
    "parity": "compare loss, norms and gradients of two configurations",
    "doctor": "look at what a run needs of this machine and say what to mend",
    "data": "build, inspect and verify datasets and traces",
}


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand and return its exit code: as a shell would say it, 128 + the signal, where Ctrl-C or
    whoever read the output ended it.
    """
    show_as_it_can()
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in `omni plan | head`: no error to tell, and not all was done either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _run(arguments: list[str]) -> int:
    """Run a subcommand. Only the chosen one is imported."""
    if arguments[:1] == ["train"]:  # Hydra reads its own command line
        return int(import_module("omni.commands.train").run(arguments[1:]))
    parser = argparse.ArgumentParser(
        prog="omni", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-V", "--version", action="version", version=version("omni-train"))
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = arguments[:1]
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if chosen == [name]:
            import_module(f"omni.commands.{name}").add_arguments(command)
    parsed, rest = parser.parse_known_args(arguments)
    if rest and ("overrides" not in parsed or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse takes positional arguments from one place alone
        parsed.overrides = [*parsed.overrides, *rest]
    return int(import_module(f"omni.commands.{parsed.command}").run(parsed))


if __name__ == "__main__":
    sys.exit(main())
