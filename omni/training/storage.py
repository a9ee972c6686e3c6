"""Where a run keeps its checkpoints."""

from pathlib import Path

from dataloader.storage import Storage
from infra.run_folder import RunFolder
from omni.config import Config, ConfigError


def storage_of(config: Config, folder: RunFolder) -> Storage:
    """Return the storage of `train.checkpoint_dir`, the run folder's own if it names none.

    Raises:
        ConfigError: if there is no such storage.
    """
    url = config.train.checkpoint_dir
    try:
        if url is not None and "://" not in url and not Path(url).is_absolute():
            raise ValueError("a relative path depends on where the run is started")
        return Storage.at(folder.checkpoints if url is None else url)
    except ValueError as error:
        raise ConfigError(
            f"train.checkpoint_dir={url}: {error}. Give an absolute path, or a URL that fsspec knows and "
            f"whose package is installed"
        ) from error
