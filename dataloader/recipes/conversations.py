"""Chats in JSON beside folders of files, as LLaVA and ShareGPT have them: an array, or an object a line.

    {"id": "17", "image": "coco/17.jpg", "conversations": [{"from": "human", "value": "<image>Hm?"}, …]}

The tokenizer's chat template writes the text, as of `omni data build --from-messages`, whenever it is read.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dataloader.chat import ChatTemplate
from dataloader.fetching import Fetcher, opened
from dataloader.format import DataError
from dataloader.manifest import TextForm
from dataloader.recipes.from_messages import form_of, text_of
from dataloader.recipes.messages import KEYS, items_of, messages_of
from dataloader.sources.beside import item_beside
from dataloader.sources.recipe import Found, FoundItem, LeftOut, Range, Text, Write
from dataloader.storage import Storage
from dataloader.tags import tags_of
from dataloader.tokenizer import Tokenizer

_BETWEEN = re.compile(r"[ \t\r\n,]*")
_UNREAD = ("video", "videos")
_Item = FoundItem | LeftOut


@dataclass(frozen=True)
class Conversations:
    """The recipe `conversations`. Paths of items are below `folder`, itself below the source's root, ""
    for that. `today` is the date that templates write which ask for it, such as 2026-11-25.
    `tags` is the key of a chat's tags, "" for none.
    """

    folder: str = ""
    today: str = ""
    tags: str = ""
    suffixes: ClassVar = (".json", ".jsonl")

    def form(self, tokenizer: Tokenizer) -> TextForm:
        """That of the tokenizer's chat template."""
        form = form_of(tokenizer)
        if "strftime_now" in tokenizer.template and not self.today:
            raise DataError(
                "the chat template writes the date, so texts would be others every day: name one, such as "
                "{name: conversations, today: 2026-11-25}"
            )
        return form

    def write(self, tokenizer: Tokenizer) -> Write:
        """What the template makes of a chat."""
        self.form(tokenizer)
        template = ChatTemplate(tokenizer.template, getattr(tokenizer, "names", {}), self.today)

        def write(raw: bytes, num_items: int) -> Text:
            chat = _chat(json.loads(raw))
            return Text(*text_of(messages_of(chat), chat.get("tools"), template, tokenizer))

        return write

    def content(self, fetcher: Fetcher, name: str, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of ranges."""
        return fetcher.ranges(name, places)

    def scan(self, storage: Storage, name: str) -> Iterator[Found | LeftOut]:
        """Chats in their order. A key is a chat's id, or its number; further ones of an id have both."""
        with opened(storage, name) as file:
            content = file.read()
        seen: set[str] = set()
        items: dict[tuple[str, str], _Item] = {}
        for number, found in enumerate(_objects(content)):
            if isinstance(found, LeftOut):
                yield found
                continue
            at, size, chat = found
            key = str(chat["id"]) if isinstance(chat, dict) and "id" in chat else str(number)
            key = f"{key}#{number}" if key in seen else key
            seen.add(key)
            yield self._found(storage, key, Range(name, at, size), content[at : at + size], chat, items)

    def _found(
        self,
        storage: Storage,
        key: str,
        text: Range,
        raw: bytes,
        chat: Any,
        known: dict[tuple[str, str], _Item],
    ) -> Found | LeftOut:
        try:
            of_chat = items_of(messages_of(_chat(chat)))
            tags = tags_of(chat.get(self.tags)) if self.tags else ()
        except Exception as error:  # whatever a stranger's chat does to a parser
            return LeftOut(key, "bad sample", str(error))
        items = []
        for modality, path in of_chat:
            item = known.get((modality, path))
            if item is None:
                item = known[modality, path] = item_beside(storage, self.folder, modality, path)
            if isinstance(item, LeftOut):
                return item._replace(key=key)
            items.append(item)
        return Found(key, text, raw, tuple(items), tags)


def _chat(raw: Any) -> Mapping[str, Any]:
    """What is known of a chat: sets have keys of their own beside. Raises DataError if it is none."""
    if not isinstance(raw, dict):
        raise DataError("it is not a JSON object")
    if unread := [key for key in _UNREAD if raw.get(key)]:
        raise DataError(f"it has {unread}, which cannot be decoded yet")
    return {key: value for key, value in raw.items() if key in KEYS}


def _objects(content: bytes) -> Iterator[tuple[int, int, Any] | LeftOut]:
    """Where each value of an array, or of lines, is in the file, its bytes, and the value."""
    if content.lstrip()[:1] != b"[":
        yield from _lines(content)
        return
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        yield LeftOut("", "damaged file", f"it is not UTF-8: {error}")
        return
    decode = json.JSONDecoder().raw_decode
    place, at = text.index("[") + 1, len(text[: text.index("[") + 1].encode())
    while True:
        gap = _BETWEEN.match(text, place)
        assert gap is not None
        place, at = gap.end(), at + gap.end() - gap.start()  # white space of JSON has a byte each
        if text[place : place + 1] == "]":
            return
        try:
            value, end = decode(text, place)
        except (ValueError, RecursionError) as error:
            yield LeftOut("", "damaged file", f"what follows is not read: {error}")
            return
        size = len(text[place:end].encode())
        yield at, size, value
        place, at = end, at + size


def _lines(content: bytes) -> Iterator[tuple[int, int, Any] | LeftOut]:
    at = 0
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            try:
                yield at, len(line), json.loads(line)
            except (ValueError, RecursionError) as error:
                yield LeftOut(f"line {number}", "bad sample", str(error))
        at += len(line) + 1
