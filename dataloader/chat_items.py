"""Items in chats: a placeholder stands where a template writes its mark of an image or a recording.

A template that takes contents in parts writes for an item what its model was trained with, such as
<|vision_start|><|image_pad|><|vision_end|>. One token of that, the mark, stands at the item's rows. One that
knows texts alone is given placeholders within them.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dataloader.chat import ChatTemplate, Message, Spans
from dataloader.format import PLACEHOLDER, DataError


def targets_with_items(
    template: ChatTemplate,
    messages: Sequence[Message],
    special: Collection[str],
    marks: Mapping[str, str],
    tools: Any = None,
) -> tuple[str, Spans]:
    """As `ChatTemplate.targets`, with a placeholder for each item of the contents, which are lists where they
    hold items. `marks` are those of modalities.

    Raises DataError if it is not known where the template puts an item.
    """
    items = [part["type"] for message in messages for part in _parts(message) if part["type"] != "text"]
    if not items:
        return template.targets(messages, special, tools)
    bare = [_without(message) for message in messages]
    plain = template.render(bare, tools)[0] if template.takes_parts else ""
    text = template.render(messages, tools)[0] if template.takes_parts else ""
    if text == plain:  # it writes nothing for items
        return template.targets([_flat(message) for message in messages], special, tools)
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
    text, spans = template.targets(messages, special, tools)
    return _marked(text, spans, items, {marks[modality]: modality for modality in items})


def _marked(text: str, spans: Spans, items: list[str], of_mark: Mapping[str, str]) -> tuple[str, Spans]:
    """The text with placeholders in the place of marks, and the spans there."""
    found = [*re.finditer("|".join(map(re.escape, of_mark)), text)]
    written = [of_mark[match[0]] for match in found]
    kinds_differ = len(of_mark) > 1 and written != items
    if len(written) != len(items) or kinds_differ:
        raise DataError(f"the template writes marks of {written} for items {items}: one mark each is known")
    pieces, shifts, end = [], [], 0
    for match in found:
        pieces += [text[end : match.start()], PLACEHOLDER]
        shifts.append((match.end(), len(match[0]) - 1))
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


def _flat(message: Message) -> Message:
    if not _parts(message):
        return message
    return {**message, "content": "".join(part.get("text", PLACEHOLDER) for part in _parts(message))}
