"""An index of samples that lie elsewhere: files are scanned by jobs, and what they found is put together.

While an index is built, its parts lie in `<out>.partial`: a build that was killed goes on there. They are put
together in the order of the files' names, so the index does not depend on who scanned what, or when.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dataloader.format import DataError
from dataloader.locks import take
from dataloader.manifest import TextForm, check_files, move_place, read_manifest
from dataloader.sources.jobs import Each, each
from dataloader.sources.merge import put_together
from dataloader.sources.recipe import Recipe, get_recipe
from dataloader.sources.recount import Counting, add_counts
from dataloader.sources.scan import File, Work, scan
from dataloader.sources.tables import BATCH_ROWS
from dataloader.storage import Storage
from dataloader.tokenizer import get_tokenizer
from dataloader.writer import INDEX_FILE, is_present, publish

_PARTS = "parts"


def build_index(
    source: str | Path,
    out: str | Path,
    recipe: str | Mapping[str, Any],
    tokenizer: Any = "bytes",
    jobs: int = 1,
    overwrite: bool = False,
    tell: Callable[[str], None] = lambda text: None,
    batch_rows: int = BATCH_ROWS,
    each_on: Callable[[Path], Each] = lambda parts: each,
) -> bool:
    """Build the index `out` of all samples in `source`, a file, folder or URL, as `recipe` finds them, and
    count their texts' tokens; False if it is there. If it is, and only the tokenizer's counts are not, these
    are added; if the same files lie in another place now, that is noted. No sample is copied, none decoded.

    `recipe` and `tokenizer` are names, or mappings of `name` and keys. `tell` hears of what happens, and of
    what was left out, by reason. `each_on` gives what does work that writes to a folder: by default
    processes of this machine. Raises DataError if there is nothing to index, if `out` is anything but
    this index and not to be overwritten, or if another build of it is under way; ValueError for a recipe or
    tokenizer that cannot be had; OSError if files cannot be read or written.
    """
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}: it must be at least 1")
    chosen = {"name": recipe} if isinstance(recipe, str) else dict(recipe)
    path = Path(out).resolve()
    of_recipe, of_tokenizer = get_recipe(chosen), get_tokenizer(tokenizer)
    form = of_recipe.form(of_tokenizer)
    storage, files = _files(source, of_recipe)
    listing = blake2b(json.dumps([vars(file) for file in files]).encode(), digest_size=16).hexdigest()
    folder = path.with_name(path.name + ".partial")
    parts = folder / _PARTS
    vocabulary = _vocabulary(of_tokenizer.name, form)
    if is_present(path) and not overwrite:
        counted, moved = _held(path, str(storage), chosen, listing, of_tokenizer.name, form)
        if moved:
            move_place(path, str(storage))
            tell(f"{path}: its files are now those of {storage}")
        if counted:
            return moved
        with _locked(folder):
            parts.mkdir(exist_ok=True)
            counting = Counting(path, tokenizer, vocabulary, parts, read_manifest(path).hash)
            add_counts(counting, each_on(parts), jobs, tell, batch_rows)
            shutil.rmtree(folder)
        return True
    with _locked(folder):
        parts.mkdir(exist_ok=True)
        work = Work(str(storage), chosen, tokenizer, vocabulary, parts)
        tell(f"indexing {len(files)} files of {storage} ...")
        for count in each_on(parts)(partial(scan, work), files, jobs):
            if count % 1000 == 0:
                tell(f"{count} of {len(files)} files are scanned")
        try:
            put_together(folder, work, files, listing, of_tokenizer, form, tell, batch_rows)
        finally:
            shutil.rmtree(parts)
        (folder / INDEX_FILE).unlink()
        publish(folder, path)
    return True


def _vocabulary(tokenizer: str, form: TextForm) -> str:
    """A name of all that token counts depend on."""
    depends = json.dumps([tokenizer, asdict(form)])
    return blake2b(depends.encode(), digest_size=4).hexdigest()


def _files(source: str | Path, recipe: Recipe) -> tuple[Storage, list[File]]:
    """The files of a source that a recipe scans, in the order of their names. Raises DataError for none."""
    storage = Storage.at(source)
    ends = " or ".join(recipe.suffixes)
    try:
        if storage.fs.isfile(storage.root):
            folder, _, name = storage.root.rpartition("/")
            storage = Storage(storage.fs, folder)
            listing = {name: storage.identity(name)}
        else:
            listing = storage.listing()
    except OSError as error:
        raise DataError(f"{source}: cannot be listed ({error})") from error
    files = [File(name, *of) for name, of in listing.items() if name.lower().endswith(recipe.suffixes)]
    if not files:
        raise DataError(
            f"{source}: there is no file {ends} among the {len(listing)} there: name their folder, or one"
        )
    return storage, files


def _held(
    path: Path, root: str, recipe: Mapping[str, Any], listing: str, tokenizer: str, form: TextForm
) -> tuple[bool, bool]:
    """Whether `path`, which is an index of that, has counts of a tokenizer, and whether its files lie below
    another root now; raises DataError if it is anything else, or damaged.
    """
    remedy = "choose another folder or overwrite it (--overwrite)"
    manifest = read_manifest(path, (tokenizer, form.tokenizer))
    check_files(path, manifest)
    place = manifest.place
    moved = place is not None and place.root != root
    if place is None or place.recipe != recipe or (moved and place.listing != listing):
        held = "a dataset of its own" if place is None else f"the index of {place.root} by {place.recipe}"
        raise DataError(f"{path} is {held}; asked for {root} by {recipe}: {remedy}")
    if place.listing != listing:
        raise DataError(
            f"{path}: files of {root} have changed, come or gone since they were indexed: {remedy}"
        )
    counted = (manifest.tokenizer, manifest.text.tokenizer) == (tokenizer, form.tokenizer)
    if counted and manifest.text != form:
        raise DataError(f"{path} has texts of {manifest.text}; asked for {form}: {remedy}")
    return counted, moved


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder of a build, by the file that builds of datasets hold it by. It is made if need be; of
    what is there parts stay. Raises DataError if another build holds it, or nobody says whether one does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / INDEX_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            if not take(lock, folder / INDEX_FILE):
                raise DataError(f"{folder}: another build of this index is under way: wait for it")
        except TimeoutError as error:
            raise DataError(str(error)) from error
        except OSError:  # a file system without locks
            pass
        for left in folder.iterdir():
            if left.name not in (_PARTS, INDEX_FILE):
                left.unlink()
        yield
    finally:
        os.close(lock)
