"""`omni eval`: held-out losses and transcriptions of a checkpoint."""

import argparse
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from omni.commands._of_checkpoint import add_checkpoint, configured, resolved, run_ranks
from omni.commands._out import make_room, writing

if TYPE_CHECKING:
    from omni.config import Config

_DESCRIPTION = """\
Evaluates a checkpoint: the loss on each dataset of data.heldout, as a run does, and of those that have
`generate` that many texts, generated freely. The configuration is that of the run with any overrides, such as
another layout or other data; the datasets that it trained on are not needed. Nothing is written to the run.

  omni eval runs/mine
  omni eval runs/mine --step 1000 launch.ranks=1 layout=data_parallel
  omni eval runs/mine '~data.heldout.docs' +data.heldout.mine.path=data/mine --out mine.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_checkpoint(parser, "write losses and transcriptions here, as JSON with the names of docs/metrics.md")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate. The exit code is that of the ranks, 2 for a user's mistake."""
    from infra.run_folder import write_json
    from omni.training.task import Task

    parent = os.getppid()  # before anything that takes time: whoever started this may end meanwhile
    try:
        spec = resolved(evaluating(configured(arguments)), Task())
        code, result = run_ranks(spec, Task(), parent)
        if arguments.out is not None and result is not None:
            with writing("--out", arguments.out):
                write_json(make_room(arguments.out), result)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code


def evaluating(config: "Config") -> "Config":
    """Return a configuration whose datasets are those held out: no step is taken, and no other one needed.

    Raises:
        ConfigError: if there are none.
    """
    from omni.config import ConfigError
    from omni.data_config import SourceConfig

    heldout = config.data.heldout
    if not heldout:
        raise ConfigError("data.heldout is empty: name a dataset, such as +data.heldout.mine.path=data/mine")
    sources = {name: SourceConfig(of.path) for name, of in heldout.items()}
    return replace(config, data=replace(config.data, sources=sources))
