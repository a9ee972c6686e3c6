"""Items that are files of their own, named by a path beside the text that they belong to."""

import errno
import os
import posixpath

from dataloader.fetching import Fetcher
from dataloader.format import SampleError
from dataloader.shared_files import SharedFiles
from dataloader.sources.heads import found_item
from dataloader.sources.recipe import FoundItem, LeftOut, Range
from dataloader.storage import Storage

_NO_NAME = (errno.ENAMETOOLONG, errno.ELOOP)  # of no file; others may pass, such as a failing disk
_SHOWN = 200  # characters of a path: a text may stand in its place


def item_beside(storage: Storage, folder: str, modality: str, path: str) -> FoundItem | LeftOut:
    """An item by its path below a folder, itself below the root of `storage`, or why it is none, with no key
    yet. A path that leads out of the root, by links too, is not followed.
    """
    shown = path[:_SHOWN]
    if "://" in path or path.startswith("data:"):
        return LeftOut("", "by URL alone", f"{shown}: download it, and name a file below {storage}")
    place = posixpath.normpath(posixpath.join(folder, path))
    no_file = LeftOut("", "no file", f"{place[:_SHOWN]} is no file below {storage}")
    fetcher = Fetcher(storage, SharedFiles())
    try:
        if place.startswith(("/", "../")) or place == ".." or _leads_out(storage, place):
            return LeftOut("", "outside the root", f"{shown} is not below {storage}")
        size, _ = fetcher.known(place)
        return found_item(
            modality,
            Range(place, 0, size),
            lambda count: fetcher.ranges(place, [(0, min(count, size))])[0],
        )
    except SampleError as error:
        return LeftOut("", "bad item", f"{shown}: {error}")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError):
        return no_file
    except OSError as error:
        if error.errno not in _NO_NAME:
            raise
        return no_file


def _leads_out(storage: Storage, place: str) -> bool:
    """Whether a path leads out of a folder of this machine by links."""
    if not storage.is_local:
        return False
    root = os.path.realpath(storage.root)
    return os.path.commonpath([root, os.path.realpath(storage.path(place))]) != root
