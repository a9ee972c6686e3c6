"""Tar files as WebDataset has them: members of one name are a sample, and what follows the name is what.

    photos/0001.jpg  photos/0001.txt  photos/0002.0.jpg  photos/0002.1.jpg  photos/0002.txt

`0001` has an image and its text, `0002` two images in the order of their names. The convention is that of
https://github.com/webdataset/webdataset; tar files are read by the standard library.
"""

import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any, ClassVar

from dataloader.fetching import opened
from dataloader.format import DataError, SampleError
from dataloader.sources.heads import FOREIGN, MODALITIES, found_item
from dataloader.sources.recipe import Found, FoundItem, LeftOut, OfBytes, Range, Text, placed
from dataloader.storage import Storage
from dataloader.tags import tags_of

_NUMBERS = re.compile(r"([0-9]+)")
_AFTER = 64 << 10  # bytes behind the end of an archive that are looked at


@dataclass
class _Members:
    """What is known of a sample while its archive is read: its text and items by what follows its name."""

    text: tuple[Range, bytes] | None = None
    tags: tuple[str, ...] = ()
    read: set[str] = field(default_factory=set)  # the members of text and tags that were met
    items: dict[str, FoundItem] = field(default_factory=dict)
    wrong: tuple[str, str] | None = None  # why it is not taken


@dataclass(frozen=True)
class WebDataset(OfBytes):
    """The recipe `webdataset`. `text` is what the name of the member ends with that has a sample's text; with
    `key` that member is a JSON object, of which the text is one value. `tags` is the key of a sample's tags
    in its member `json`.

    Members of a sample need not be neighbours. Members that are neither text nor item are passed over.
    """

    text_of: str
    key: str
    tags: str
    suffixes: ClassVar = (".tar",)

    def __init__(self, text: str = "txt", key: str = "", tags: str = "") -> None:
        if not text or text.rpartition(".")[2] in MODALITIES:
            raise ValueError(f"text={text!r} must be what a member of text ends with, such as txt or json")
        object.__setattr__(self, "text_of", text.lower())
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "tags", tags)

    def scan(self, storage: Storage, name: str) -> Iterator[Found | LeftOut]:
        """Samples in the order of their first members; keys are names up to their first dot."""
        samples: dict[str, _Members] = {}
        with opened(storage, name, ahead=True) as file:
            size = file.seek(0, 2)
            file.seek(0)
            try:
                for member in _walk(file, size):
                    if isinstance(member, LeftOut):
                        yield member
                    else:
                        self._take(file, name, size, member, samples)
            except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
                yield LeftOut("", "not a whole archive", str(error))
        for key, of in samples.items():
            if of.wrong is not None:
                yield LeftOut(key, *of.wrong)
            elif of.text is None:
                yield LeftOut(key, "no text", f"it has no member .{self.text_of}")
            else:
                items = tuple(of.items[kind] for kind in sorted(of.items, key=_in_order))
                yield Found(key, *of.text, items, of.tags)

    def text(self, raw: bytes, num_items: int) -> Text:
        """The text, with its items before it unless it has placeholders for them."""
        try:
            text = raw.decode()
            if self.key:
                text = json.loads(text)[self.key]
        except UnicodeDecodeError as error:
            raise DataError(f"its text is not UTF-8 ({error})") from None
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"its .{self.text_of} is no JSON object with the key {self.key!r} ({error})"
            ) from None
        if not isinstance(text, str):
            raise DataError(f"{self.key!r} of its .{self.text_of} is {str(text)[:40]!r}, not a text")
        return Text(placed(text, num_items))

    def _take(
        self, file: IO[bytes], name: str, size: int, member: tarfile.TarInfo, samples: dict[str, _Members]
    ) -> None:
        """Note what a member is to its sample."""
        folder, _, last = member.name.rpartition("/")
        stem, dot, kind = last.partition(".")
        if not (stem and dot):
            return
        kind = kind.lower()
        ending = kind.rpartition(".")[2]
        tagged = bool(self.tags) and kind == "json"
        if kind != self.text_of and not tagged and ending not in MODALITIES and ending not in FOREIGN:
            return
        of = samples.setdefault(f"{folder}/{stem}" if folder else stem, _Members())
        place = Range(name, member.offset_data, member.size)
        if not member.isreg() or member.issparse():
            of.wrong = ("not a plain file", f".{kind} is a link, or has holes")
        elif place.at + place.bytes > size:
            of.wrong = ("cut short", f".{kind} should end at byte {place.at + place.bytes} of {size}")
        elif kind in of.items or kind in of.read:
            of.wrong = ("repeated member", f"it has two members .{kind}")
        elif kind == self.text_of or tagged:
            raw = _first(file, place, place.bytes)
            of.read.add(kind)
            if kind == self.text_of:
                of.text = (place, raw)
            if tagged:
                try:
                    of.tags = tags_of(_value(raw, self.tags))
                except DataError as error:
                    of.wrong = ("bad sample", str(error))
        elif ending in FOREIGN:
            of.wrong = ("unknown format", f".{kind} cannot be decoded")
        else:
            try:
                of.items[kind] = found_item(
                    MODALITIES[ending], place, lambda count: _first(file, place, count)
                )
            except SampleError as error:
                of.wrong = ("bad item", f".{kind}: {error}")


def _value(raw: bytes, key: str) -> Any:
    """The value of a JSON object, None where it lacks the key. Raises DataError if it is none."""
    try:
        return json.loads(raw).get(key)
    except (AttributeError, ValueError, RecursionError) as error:
        raise DataError(f"its .json is no JSON object ({error})") from None


def _first(file: IO[bytes], place: Range, count: int) -> bytes:
    file.seek(place.at)
    return file.read(min(count, place.bytes))


def _in_order(kind: str) -> list[tuple[int, str]]:
    """Sort 2.jpg before 10.jpg."""
    parts = enumerate(_NUMBERS.split(kind))  # every second one is a number
    return [(int(part), "") if number % 2 else (-1, part) for number, part in parts]


class _Member(tarfile.TarInfo):
    """A member of which the header of a plain file is read quickly: half of the time of an index went to
    owners, dates and rights. All other headers are the library's.
    """

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> "_Member":
        """As `TarInfo.frombuf`."""
        stated, size = buf[148:156].strip(b" \0"), buf[124:136].strip(b" \0")
        plain = len(buf) == tarfile.BLOCKSIZE and buf[156:157] == b"0" and buf[257:262] == b"ustar"
        if not (plain and stated.isdigit() and size.isdigit()):
            return super().frombuf(buf, encoding, errors)
        try:
            right = int(stated, 8) == 256 + sum(buf) - sum(buf[148:156])
            member = cls()
            member.size = int(size, 8)
        except ValueError:
            right = False
        if not right:
            return super().frombuf(buf, encoding, errors)
        name, prefix = (field.partition(b"\0")[0] for field in (buf[:100], buf[345:500]))
        member.name = (prefix + b"/" + name if prefix else name).decode(encoding, errors)
        return member


def _walk(file: IO[bytes], size: int) -> Iterator[tarfile.TarInfo | LeftOut]:
    """The members of an archive of `size` bytes, and what is wrong with its end. Raises tarfile's errors."""
    with tarfile.open(fileobj=file, mode="r:", tarinfo=_Member) as archive:
        before = -1
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # it keeps all that it has read
            if archive.offset <= before:  # a size below 0 makes tarfile turn in a circle
                yield LeftOut(member.name, "damaged archive", "its size makes no sense")
                return
            before = archive.offset
            if member.name.startswith("/") or ".." in member.name.split("/"):
                yield LeftOut(member.name, "outside the archive", "its name leads out of it")
            elif not member.isdir():
                yield member
        file.seek(archive.offset)
        rest = file.read(_AFTER)
    if rest[: tarfile.BLOCKSIZE].strip(b"\0"):
        yield LeftOut("", "damaged archive", f"byte {archive.offset} is no header; what follows is not read")
    elif len(rest) < tarfile.BLOCKSIZE:
        yield LeftOut("", "not a whole archive", f"it ends at byte {size} without the mark of its end")
    elif rest.strip(b"\0"):
        yield LeftOut(
            "", "more than an archive", f"what follows its end at byte {archive.offset} is not read"
        )
