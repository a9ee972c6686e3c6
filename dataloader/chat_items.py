"""Items in chats: a placeholder stands where a template writes its mark of an image or a recording.

A template that takes contents in parts writes for an item what its model was trained with, such as
<|vision_start|><|image_pad|><|vision_end|>. One token of that, the mark, stands at the item's rows. One that
knows texts alone is given placeholders within them. Some models have further texts around the rows, which
their template does not write: these are put there.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from dataloader.chat import ChatTemplate, Message, Spans
from dataloader.format import PLACEHOLDER, DataError

Around = Mapping[str, tuple[str, str]]
"""Texts before and behind the rows of an item, by modality."""


def targets_with_items(
    template: ChatTemplate,
    messages: Sequence[Message],
    special: Collection[str],
    marks: Mapping[str, str],
    tools: Any = None,
    around: Around | None = None,
) -> tuple[str, Spans]:
    """As `ChatTemplate.targets`, with a placeholder for each item of the contents, which are lists where they
    hold items. `marks` are those of modalities, `around` texts before and behind rows.

    Raises DataError if it is not known where the template puts an item.
    """
    return _with_items(
        template, messages, marks, tools, around, lambda own: template.targets(own, special, tools)
    )


def prompt_with_items(
    template: ChatTemplate,
    messages: Sequence[Message],
    marks: Mapping[str, str],
    tools: Any = None,
    around: Around | None = None,
) -> str:
    """As `ChatTemplate.prompt`, with placeholders as in `targets_with_items`."""

    def write(own: Sequence[Message]) -> tuple[str, Spans]:
        return template.prompt(own, tools), ()

    return _with_items(template, messages, marks, tools, around, write)[0]


def without_items(messages: Sequence[Message]) -> list[Message]:
    """Messages whose contents are their texts alone."""
    return [_flat(message, _Nothing()) for message in messages]


class _Nothing(dict[str, str]):
    """No text in the place of items of any modality."""

    def __missing__(self, modality: str) -> str:
        return ""


def _with_items(
    template: ChatTemplate,
    messages: Sequence[Message],
    marks: Mapping[str, str],
    tools: Any,
    around: Around | None,
    write: Callable[[Sequence[Message]], tuple[str, Spans]],
) -> tuple[str, Spans]:
    """What `write` makes of messages, with placeholders."""
    items = [part["type"] for message in messages for part in _parts(message) if part["type"] != "text"]
    if not items:
        return write(messages)
    stands = {kind: PLACEHOLDER.join((around or {}).get(kind, ("", ""))) for kind in items}
    bare = [_without(message) for message in messages]
    plain = template.render(bare, tools)[0] if template.takes_parts else ""
    text = template.render(messages, tools)[0] if template.takes_parts else ""
    if text == plain:  # it writes nothing for items
        return write([_flat(message, stands) for message in messages])
    for modality in dict.fromkeys(items):
        mark = marks.get(modality)
        if mark is None or mark not in text:
            named = f", which has no {mark}" if mark else ""
            raise DataError(
                f"the template writes of its own for an {modality}{named}: name the token at its rows, such "
                f"as item: '<|image_pad|>' of the tokenizer"
            )
        if mark in plain:
            raise DataError(f"a message spells {mark!r}, which marks an {modality}: take it out")
    text, spans = write(messages)
    return _marked(text, spans, items, {marks[modality]: modality for modality in items}, stands)


def _marked(
    text: str, spans: Spans, items: list[str], of_mark: Mapping[str, str], stands: Mapping[str, str]
) -> tuple[str, Spans]:
    """The text with placeholders, and what stands around them, in the place of marks, and the spans there."""
    found = [*re.finditer("|".join(map(re.escape, of_mark)), text)]
    written = [of_mark[match[0]] for match in found]
    kinds_differ = len(of_mark) > 1 and written != items
    if len(written) != len(items) or kinds_differ:
        raise DataError(f"the template writes marks of {written} for items {items}: one mark each is known")
    pieces, shifts, end = [], [], 0
    for match in found:
        own = stands[of_mark[match[0]]]
        pieces += [text[end : match.start()], own]
        shifts.append((match.end(), len(match[0]) - len(own)))
        end = match.end()

    def moved(place: int) -> int:
        return place - sum(shift for stop, shift in shifts if stop <= place)

    return "".join([*pieces, text[end:]]), tuple((moved(start), moved(stop)) for start, stop in spans)


def _parts(message: Message) -> list[dict[str, str]]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _without(message: Message) -> Message:
    if not _parts(message):
        return message
    return {**message, "content": [part for part in _parts(message) if part["type"] == "text"]}


def _flat(message: Message, stands: Mapping[str, str]) -> Message:
    if not _parts(message):
        return message
    said = (part["text"] if part["type"] == "text" else stands[part["type"]] for part in _parts(message))
    return {**message, "content": "".join(said)}
