"""torchrun, with its exit code and output made useful: `python -m infra.agent <torchrun's arguments>`.

torchrun answers the failure of a worker with a traceback of its own and exit code 1, whatever the worker
said. This one keeps the worker's code (128 + n for a signal), so that a mistake in the configuration and a
crash can be told apart, and leaves the screen to the worker's message.
"""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def run(arguments: list[str]) -> int:
    """Run torchrun and return the exit code."""
    try:
        main(arguments)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return 128 - failure.exitcode if failure.exitcode < 0 else failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
