"""Items that are files of their own, named by a path beside the text that they belong to."""

import os
import posixpath
from functools import partial

from dataloader.format import SampleError
from dataloader.sources.heads import found_item
from dataloader.sources.recipe import FoundItem, LeftOut, Range
from dataloader.storage import Storage


def item_beside(storage: Storage, folder: str, modality: str, path: str) -> FoundItem | LeftOut:
    """An item by its path below a folder, itself below the root of `storage`, or why it is none, with no key
    yet. A path that leads out of the root, by links too, is not followed.
    """
    if "://" in path:
        return LeftOut("", "by URL alone", f"{path[:200]}: download it, and name a file below {storage}")
    place = posixpath.normpath(posixpath.join(folder, path))
    if place.startswith(("/", "../")) or place == ".." or _leads_out(storage, place):
        return LeftOut("", "outside the root", f"{path} is not below {storage}")
    try:
        size, _ = storage.identity(place)
        return found_item(modality, Range(place, 0, size), partial(storage.first, place))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return LeftOut("", "no file", f"{place} is no file below {storage}")
    except SampleError as error:
        return LeftOut("", "bad item", f"{path}: {error}")


def _leads_out(storage: Storage, place: str) -> bool:
    """Whether a path leads out of a folder of this machine by links."""
    if not storage.is_local:
        return False
    root = os.path.realpath(storage.root)
    return os.path.commonpath([root, os.path.realpath(storage.path(place))]) != root
