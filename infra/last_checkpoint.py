"""Which checkpoint a run had last, noted in its folder: so a store that is empty, or not mounted, is told
from that of a run which has saved nothing yet.
"""

import socket

from dataloader.storage import Storage
from infra.checkpoint import DAMAGED, MANIFEST, CheckpointError, folder_of
from infra.run_folder import RunFolder, write_text
from infra.screen import beside


def note_last(folder: RunFolder, storage: Storage, step: int) -> None:
    """Note that the checkpoint of `step` is there. Where that cannot be written, it is said: what a run notes
    of itself ends no training.
    """
    try:
        write_text(folder.last_checkpoint, storage.locate(folder_of(step)) + "\n")
    except OSError as error:
        beside(
            f"note: {folder.last_checkpoint} cannot be written ({error}): should its store be empty or not "
            f"mounted, this run would not see that, and begin anew"
        )


def check_last(folder: RunFolder, storage: Storage) -> None:
    """Refuse to begin a run anew that has saved a checkpoint. One that was set aside is there, too.

    Raises:
        CheckpointError: if the folder knows of a checkpoint, and the storage has none.
    """
    if not folder.last_checkpoint.exists():
        return
    if any(storage.holds(f"{name}/{kind}") for name in storage.sizes() for kind in (MANIFEST, DAMAGED)):
        return
    last = folder.last_checkpoint.read_text(encoding="utf-8", errors="replace").strip()
    raise CheckpointError(
        f"train.checkpoint_dir: no checkpoint is in {storage} as {socket.gethostname()} sees it, and this "
        f"run saved {last}. Is it mounted? Mount it, or set train.checkpoint_dir to where the checkpoints "
        f"are; or remove {folder.last_checkpoint} to train from the start"
    )
