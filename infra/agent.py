"""torchrun, made useful to a launch: `python -m infra.agent <torchrun's arguments>`.

Seven things differ from torchrun's own agent:

- It ends with the process that started it, and its workers end with it (infra/lineage.py).
- It answers the failure of a worker with the worker's exit code (128 + n for a signal) and leaves the screen
  to the worker's message, where torchrun prints a traceback of its own and exits with 1.
- A worker that found a mistake in the configuration or the data (exit code 2) is not restarted: it would
  find it again.
- The store at which workers meet is the agent's, made anew for each start of them. torchrun either looks for
  a free port and lets go of it, for rank 0 to take seconds later if nobody else has, or keeps one store for
  all starts, in which restarted workers find the addresses of those before.
- Nobody takes part who does not know the run's secret, and of one machine nobody from beyond it can connect
  (infra/meeting.py).
- The folder in which torchrun keeps what it knows of workers goes when it ends, or after it was killed
  (infra/agent_folder.py).
- Workers are forked from a process that has imported what they import (infra/forkserver.py), which does so
  while this one imports torch.
"""

import argparse
import os
import socket
import sys
from contextlib import ExitStack, closing

from infra.agent_folder import agent_folder, remove_unused
from infra.forkserver import ForkServer
from infra.launch import MISTAKE
from infra.lineage import STARTED_BY, end_with_parent
from infra.relay import LOOPBACK
from parallel.handshake import SECRET, new_secret, secret_of_run

CONNECT_S = 10.0


def run(arguments: list[str]) -> int:
    """Run torchrun and return the exit code. What it runs is the module after `-m`."""
    own = arguments[: arguments.index("-m")] if "-m" in arguments else arguments
    try:
        _check_loopback()
        os.environ[SECRET] = secret_of_run().hex() if _meets_others(own) else new_secret()
    except ValueError as error:
        print(f"agent: error: {error}", file=sys.stderr)
        return MISTAKE
    os.environ[STARTED_BY] = str(os.getpid())
    # Asked how many GPUs there are, torch asks the driver's library beside CUDA: CUDA itself, once touched by
    # the server, could not be used by the ranks that it forks.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    with ExitStack() as held:
        server = None
        if sys.platform == "linux" and "-m" in arguments:
            module, *own = arguments[arguments.index("-m") + 1 :]
            server = held.enter_context(closing(ForkServer(module, own)))
        remove_unused()
        logs = held.enter_context(agent_folder())
        from infra.elastic_agent import run_torchrun  # torch, while the server imports

        return run_torchrun([f"--log-dir={logs}", *arguments], server)  # of two, the last one counts


def _check_loopback() -> None:
    """Raise ValueError if processes of this machine cannot connect to each other: ranks would try long."""
    try:
        with socket.create_server((LOOPBACK, 0)) as listener:
            socket.create_connection(listener.getsockname(), CONNECT_S).close()
    except OSError as error:
        raise ValueError(
            f"nothing on this machine can be reached at {LOOPBACK}, where ranks meet ({error}): bring its "
            f"loopback interface up (ip link set lo up)"
        ) from error


def _meets_others(arguments: list[str]) -> bool:
    """Whether torchrun's arguments are those of one agent of several."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--nnodes", default=os.environ.get("PET_NNODES", "1"))
    return parser.parse_known_args(arguments)[0].nnodes not in ("1", "1:1")


if __name__ == "__main__":
    end_with_parent()
    sys.exit(run(sys.argv[1:]))
