"""What a user asks a model: texts, and chats that its template writes up to where the model goes on.

Items of chats are counted here and read by the ranks that encode them: `PromptItems` reads their files as a
dataset's reader reads samples.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from dataloader.chat import ChatTemplate
from dataloader.chat_items import prompt_with_items, without_items
from dataloader.format import PLACEHOLDER, DataError, Item, Sample
from dataloader.item_counts import ItemCounts
from dataloader.manifest import Frame
from dataloader.recipes.from_jsonl import item_of
from dataloader.recipes.messages import items_of, messages_of
from dataloader.tokenizer import Tokenizer
from dataloader.tokens import ItemMeta, SampleMeta, text_tokens, tokenize

SOURCE = "prompts"
_FRAME = Frame(bos=False, end_of_item=False, eos=False)  # what begins a text is among its ids
_SHOWN = 20  # bad lines


@dataclass(frozen=True)
class Asked:
    """One prompt: its name, what the user gave in the form of JSON, its input ids with those at rows of
    items, the ids of the tokens that end an answer to it, its items, and their files.
    """

    name: str
    given: Mapping[str, Any]
    ids: tuple[int, ...]
    ends: frozenset[int]
    items: tuple[ItemMeta, ...] = ()
    files: tuple[str, ...] = ()

    def meta(self, number: int) -> SampleMeta:
        """The prompt as sample `number`, without payload."""
        rows = sum(item.rows for item in self.items)
        return SampleMeta(number, SOURCE, len(self.ids) - rows, self.items, 0, frame=_FRAME)


@dataclass(frozen=True)
class PromptItems:
    """Reads items of prompts, by the prompt's number: of each their modalities and files."""

    files: Sequence[Sequence[tuple[str, str]]]

    def read(self, i: int, text: bool, items: bool | Sequence[int]) -> Sample:
        """Items of prompt `i`. Raises DataError for a file that is there no more."""
        assert not text
        assert not isinstance(items, bool)
        own = [self.files[i][number] for number in items]
        read = (_item(modality, file, Path(file).parent) for modality, file in own)
        return Sample(str(i), PLACEHOLDER * len(own), tuple(read))


def _item(modality: str, path: str, folder: Path) -> Item:
    """Read an item that lies below a folder."""
    return item_of({"modality": modality, "path": path}, folder, folder)


def of_texts(texts: Sequence[str], tokenizer: Tokenizer) -> list[Asked]:
    """Return texts that the model is to go on with, after its bos if it has one.

    Raises:
        DataError: for a text without tokens, or with the placeholder of an item.
    """
    begin = () if tokenizer.bos is None else (tokenizer.bos,)
    return [
        Asked(str(number), {"prompt": text}, (*begin, *_ids(text, tokenizer, bool(begin))), _end(tokenizer))
        for number, text in enumerate(texts, 1)
    ]


def of_messages(jsonl: Path, tokenizer: Tokenizer, counts: ItemCounts) -> list[Asked]:
    """Return the chats of a file, in the form of `omni data build --from-messages`, that are to be answered.
    Their items lie below the file's folder; `counts` says what encoders make of them.

    Raises:
        DataError: naming the file and its bad lines, or a tokenizer without template.
    """
    if not tokenizer.template:
        raise DataError(
            f"tokenizer {tokenizer.name} has no chat template, which would write the messages of {jsonl}: "
            "give texts with --prompt, or a template, such as "
            "'data.tokenizer={name: hf, path: DIR, template: FILE}'"
        )
    template = ChatTemplate(tokenizer.template, getattr(tokenizer, "names", {}), str(date.today()))
    asked, bad = [], []
    try:
        lines = jsonl.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"--messages {jsonl}: {error.strerror}: give the path of a JSONL file") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                asked.append(_chat(line, number, template, tokenizer, counts, jsonl.resolve().parent))
            except (ValueError, RecursionError) as error:
                bad.append(f"{jsonl}:{number}: {error}")
    if bad:
        more = [f"… and {len(bad) - _SHOWN} more"] if len(bad) > _SHOWN else []
        raise DataError("\n".join([*bad[:_SHOWN], *more]))
    if not asked:
        raise DataError(f"--messages {jsonl}: there is no chat in it: give one a line")
    return asked


def _chat(
    line: bytes, number: int, template: ChatTemplate, tokenizer: Tokenizer, counts: ItemCounts, folder: Path
) -> Asked:
    raw = json.loads(line)
    if not isinstance(raw, dict):
        raise DataError("the line is not a JSON object")
    messages, tools = messages_of(raw), raw.get("tools")
    if messages[-1]["role"] == "assistant":
        raise DataError("an assistant has the last word, so nothing is asked: leave its last message out")
    closing = template.closing(without_items(messages), tokenizer.special, tools)
    ends = _end(tokenizer) | ({tokenizer.special[closing]} if closing else frozenset())
    given = {"messages": messages} | ({"tools": tools} if tools else {})
    name, listed = str(raw.get("id", number)), items_of(messages)
    if not listed:
        return Asked(name, given, _ids(template.prompt(messages, tools), tokenizer, False), ends)
    marks, around = getattr(tokenizer, "marks", {}), getattr(tokenizer, "around", {})
    items = tuple(_item(modality, path, folder) for modality, path in listed)
    text = prompt_with_items(template, messages, marks, tools, around)
    if text.count(PLACEHOLDER) != len(items):
        raise DataError("a message holds U+FFFC, where an item would stand: take it out")
    sample = Sample(name, text, items)
    own = text_tokens(sample, tokenizer)
    made = tuple(
        ItemMeta(item.modality, *counts(item.modality, item.size), at, item.size)
        for item, at in zip(items, own.items, strict=True)
    )
    meta = SampleMeta(number, SOURCE, len(own.ids), made, 0, frame=_FRAME)
    files = tuple(str((folder / path).resolve()) for _, path in listed)
    return Asked(name, given, tuple(tokenize(sample, meta, tokenizer)[0].tolist()), ends, made, files)


def _ids(text: str, tokenizer: Tokenizer, begun: bool) -> tuple[int, ...]:
    if PLACEHOLDER in text:
        raise DataError(f"{text!r} holds U+FFFC, where an item would stand: prompts are of text alone")
    ids = tuple(tokenizer.encode(text).ids.tolist())
    if not ids and not begun:
        raise DataError(
            f"{text!r} has no token, and tokenizer {tokenizer.name} none that begins a text: say something"
        )
    return ids


def _end(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset({tokenizer.eos})
