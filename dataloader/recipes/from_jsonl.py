"""A dataset from a user's own files: one JSON object per line."""

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

from dataloader.audio import decode_audio, read_audio_size
from dataloader.decode import decode_image, read_image_size
from dataloader.format import DataError, Item, Sample, SampleError, validate_sample
from dataloader.manifest import MANIFEST
from dataloader.tokenizer import Tokenizer
from dataloader.writer import DatasetWriter, is_intact

_SAMPLE_KEYS = {"id", "text", "items", "targets"}
_ITEM_KEYS = {"modality", "path", "format", "size"}
_READ_SIZE = {"audio": read_audio_size, "image": read_image_size}
_DECODE: dict[str, Callable[[Item], Any]] = {"audio": decode_audio, "image": decode_image}
_SHOWN = 20  # bad lines


def build_from_jsonl(
    jsonl: str | Path,
    out: str | Path,
    tokenizer: Tokenizer,
    rows_per_group: int = 32,
    groups_per_shard: int = 64,
    overwrite: bool = False,
    root: str | Path | None = None,
    skip_bad: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> bool:
    """Build the dataset `out` from the lines of `jsonl`; False if it is there, built from the same lines.

    A line is {"id": str, "text": str with U+FFFC where items stand, "items": [{"modality": "image", "path":
    str}, …], "targets": [[start, stop], …]}; items and targets may be left out, paths are relative to the
    file, and lead to regular files below the folder `root`, that of the file if it is None. Format and size
    of images and recordings are read from their headers, and they are decoded, so that damage is found;
    items of other modalities state "format" and "size" themselves.

    `tell` is called when building begins, with each of up to `skip_bad` bad lines, which are left out, and of
    files that are newer than the dataset that is there.
    Raises DataError naming the file and the first `_SHOWN` bad lines if there are more; all lines are looked
    at, until there are `_SHOWN` too many.
    """
    jsonl = Path(jsonl)
    allowed = (Path(root) if root is not None else jsonl.parent).resolve()
    recipe = f"jsonl {recipe_of(jsonl)}"
    if not overwrite and is_intact(out, recipe, tokenizer):
        tell_of_newer(jsonl, out, lambda raw: [item["path"] for item in raw.get("items", ())], tell)
        return False
    tell(f"building {out} from {jsonl} ...")
    with DatasetWriter(out, tokenizer, rows_per_group, groups_per_shard, overwrite, recipe) as writer:
        for text in add_lines(
            jsonl, lambda line, number: _sample(line, jsonl.parent, allowed), writer, skip_bad
        ):
            tell(f"left out {text}")
    return True


def recipe_of(jsonl: str | Path) -> str:
    """A name of what a file of lines holds. Raises DataError if it cannot be read."""
    try:
        if not Path(jsonl).is_file():  # it is read twice, which a pipe is not
            raise DataError(f"{jsonl}: is no regular file: give the path of a JSONL file")
        with open(jsonl, "rb") as lines:
            return f"sha256={file_digest(lines, 'sha256').hexdigest()[:16]}"
    except OSError as error:
        raise DataError(
            f"{jsonl}: cannot be read ({error.strerror}): give the path of a JSONL file"
        ) from None


def tell_of_newer(
    jsonl: Path, out: str | Path, paths_of: Callable[[Any], Iterable[str]], tell: Callable[[str], None]
) -> None:
    """Tell of files that were written after the dataset `out`, which holds them as they were. `paths_of`
    gives those of a line's object. They are not read.
    """
    built = (Path(out) / MANIFEST).stat().st_mtime_ns
    newer = [file for file in _listed(jsonl, paths_of) if file.stat().st_mtime_ns > built]
    if newer:
        tell(
            f"note: {len(newer)} files are newer than {out}, such as {newer[0]}: the dataset holds them as "
            f"they were when it was built; build it anew by --overwrite"
        )


def _listed(jsonl: Path, paths_of: Callable[[Any], Iterable[str]]) -> Iterator[Path]:
    """The files that lines name, of those that are there."""
    with open(jsonl, "rb") as lines:
        for line in filter(bytes.strip, lines):
            try:
                files = [jsonl.parent / path for path in paths_of(json.loads(line))]
            except Exception:  # a bad line, which the build left out
                continue
            yield from (file for file in files if file.is_file())


def add_lines(
    jsonl: Path, parse: Callable[[bytes, int], Sample], writer: DatasetWriter, skip_bad: int
) -> list[str]:
    """Write the samples that `parse` makes of all lines, given their numbers, but of the bad ones, and return
    what is wrong with these.
    """
    bad: list[str] = []
    names: dict[bytes, int] = {}
    number = 0
    with open(jsonl, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                sample = parse(line, number)
                validate_sample(sample)
                _check_name(sample, number, names)
            except Exception as error:  # whatever a stranger's line does to a parser or a decoder
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                bad.append(f"{jsonl}:{number}: {kind}{error}")
            else:
                writer.add(sample)
            if len(bad) == skip_bad + _SHOWN:
                break
    if len(bad) > skip_bad:
        raise DataError(_told(bad, skip_bad, number))
    if not names:
        raise DataError(
            f"{jsonl}: it holds no sample"
            + (f" but the {len(bad)} bad ones that were left out" if bad else ": no line has anything in it")
        )
    return bad


def _told(bad: Sequence[str], skip_bad: int, read: int) -> str:
    if len(bad) == 1:
        return bad[0]
    more = f"\n… and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return (
        f"{len(bad)} of the first {read} lines are bad, more than the {skip_bad} that may be left out "
        f"(--skip-bad):\n" + "\n".join(bad[:_SHOWN]) + more
    )


def _check_name(sample: Sample, number: int, names: dict[bytes, int]) -> None:
    """Refuse a sample whose id an earlier line has. `names` are digests of ids, by 16 bytes each."""
    name = blake2b(sample.id.encode(), digest_size=16).digest()
    first = names.setdefault(name, number)
    if first != number:
        raise DataError(f"its id {sample.id!r} is that of line {first}: give each sample a name of its own")


def _sample(line: bytes, folder: Path, allowed: Path) -> Sample:
    raw = _object(json.loads(line), "the line", _SAMPLE_KEYS)
    for key in ("id", "text"):
        if not isinstance(raw.get(key), str):
            raise DataError(f'"{key}" is {raw.get(key)!r}: it must be a string')
    listed = raw.get("items", [])
    if not isinstance(listed, list):
        raise DataError(f'"items" is {listed!r}: it must be a list of objects')
    items = tuple(item_of(_object(item, "an item", _ITEM_KEYS), folder, allowed) for item in listed)
    return Sample(raw["id"], raw["text"], items, _targets(raw.get("targets")))


def item_of(raw: dict[str, Any], folder: Path, allowed: Path) -> Item:
    """An item of a line, read from its file. Raises DataError naming what is wrong with it."""
    modality, path, kind, size = (raw.get(key) for key in ("modality", "path", "format", "size"))
    if not isinstance(modality, str) or not isinstance(path, str):
        raise DataError(f'item {raw} needs a "modality" and a "path", both strings')
    data = _contents(folder / path, allowed)
    if modality in _READ_SIZE:
        try:
            item = Item(modality, *_READ_SIZE[modality](data), data)
            _DECODE[modality](item)
        except SampleError as error:
            raise DataError(f"{folder / path}: {error}") from error
        return item
    if not isinstance(kind, str) or not isinstance(size, list) or not all(type(n) is int for n in size):
        raise DataError(
            f'item {path} of modality {modality!r} must state "format" (a string) and "size" (integers): '
            f"only {', '.join(_READ_SIZE)} are read from the file"
        )
    return Item(modality, kind, tuple(size), data)


def _contents(file: Path, allowed: Path) -> bytes:
    """The bytes of a regular file below the folder `allowed`: a stranger's line opens no device, and nothing
    that is elsewhere.
    """
    try:
        real = file.resolve(strict=True)
        if not real.is_relative_to(allowed):
            raise DataError(f"{file}: lies outside {allowed}: name the folder that holds all files by --root")
        # Not to wait for who writes into a pipe.
        with open(os.open(real, os.O_RDONLY | os.O_NONBLOCK), "rb") as handle:
            if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
                raise DataError(f"{file}: is no regular file")
            return handle.read()
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}: fix the path, it is relative to the file") from None


def _object(value: Any, what: str, known: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{what} is not a JSON object")
    unknown = sorted(set(value) - known)
    if unknown:
        raise DataError(f"{what} has unknown keys {unknown}: known are {sorted(known)}")
    return value


def _targets(raw: Any) -> tuple[tuple[int, int], ...] | None:
    if raw is None:
        return None
    if not isinstance(raw, list) or not all(
        isinstance(span, list) and len(span) == 2 and all(type(n) is int for n in span) for span in raw
    ):
        raise DataError(f'"targets" is {raw!r}: it must be a list of [start, stop] character positions')
    return tuple((start, stop) for start, stop in raw)
