"""The product's worker, in a process that cannot use a GPU if it was forked: see fault_strangers.py.

python -m infra.agent ... -m poisoned_worker RUN_FOLDER/config.yaml
"""

import os
import sys
from pathlib import Path

import torch

from omni.training import worker

importer = os.getpid()
torch.cuda._is_in_bad_fork = lambda: os.getpid() != importer  # type: ignore[assignment]

if __name__ == "__main__":
    worker.exit_with(worker.main, Path(sys.argv[1]))
