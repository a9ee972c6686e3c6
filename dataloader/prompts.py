"""What a user asks a model: texts, and chats that its template writes up to where the model goes on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from dataloader.chat import ChatTemplate
from dataloader.format import PLACEHOLDER, DataError
from dataloader.manifest import Frame
from dataloader.recipes.messages import items_of, messages_of
from dataloader.tokenizer import Tokenizer
from dataloader.tokens import SampleMeta

SOURCE = "prompts"
_FRAME = Frame(bos=False, end_of_item=False, eos=False)  # what begins a text is among its ids
_SHOWN = 20  # bad lines


@dataclass(frozen=True)
class Asked:
    """One prompt: its name, what the user gave in the form of JSON, its input ids, and those of the tokens
    that end an answer to it.
    """

    name: str
    given: Mapping[str, Any]
    ids: tuple[int, ...]
    ends: frozenset[int]


def metas_of(prompts: Sequence[Sequence[int]]) -> list[SampleMeta]:
    """Return prompts, given by their ids, as samples without payload."""
    return [SampleMeta(number, SOURCE, len(ids), (), 0, frame=_FRAME) for number, ids in enumerate(prompts)]


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


def of_messages(jsonl: Path, tokenizer: Tokenizer) -> list[Asked]:
    """Return the chats of a file, in the form of `omni data build --from-messages`, that are to be answered.

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
                asked.append(_chat(line, number, template, tokenizer))
            except ValueError as error:
                bad.append(f"{jsonl}:{number}: {error}")
    if bad:
        more = [f"… and {len(bad) - _SHOWN} more"] if len(bad) > _SHOWN else []
        raise DataError("\n".join([*bad[:_SHOWN], *more]))
    if not asked:
        raise DataError(f"--messages {jsonl}: there is no chat in it: give one a line")
    return asked


def _chat(line: bytes, number: int, template: ChatTemplate, tokenizer: Tokenizer) -> Asked:
    raw = json.loads(line)
    if not isinstance(raw, dict):
        raise DataError("the line is not a JSON object")
    messages, tools = messages_of(raw), raw.get("tools")
    if items_of(messages):
        raise DataError("a message holds an image or a recording: prompts are of text alone")
    if messages[-1]["role"] == "assistant":
        raise DataError("an assistant has the last word, so nothing is asked: leave its last message out")
    text = template.prompt(messages, tools)
    closing = template.closing(messages, tokenizer.special, tools)
    ends = _end(tokenizer) | ({tokenizer.special[closing]} if closing else frozenset())
    given = {"messages": messages} | ({"tools": tools} if tools else {})
    return Asked(str(raw.get("id", number)), given, _ids(text, tokenizer, False), ends)


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
