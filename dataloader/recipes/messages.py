"""Chats in the forms of OpenAI and of ShareGPT, as the one form that chat templates take.

A content is a text or, where it holds items, a list of parts: {"type": "text", "text": …}, {"type": "image",
"image": PATH} and {"type": "audio", "audio": PATH}.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dataloader.chat import Message
from dataloader.format import DataError

ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "tool": "tool", "observation": "tool",
}  # fmt: skip
LISTS = {"image": "images", "audio": "audios"}
"""Of paths of a line's items, by modality; a tag in a text, such as <image>, stands for the next of them."""
KEYS = {"id", "messages", "conversations", "system", "tools", "image", *LISTS.values()}
_NESTED = {"image_url": "image", "audio_url": "audio"}


def messages_of(raw: Mapping[str, Any]) -> list[Message]:
    """The messages of a line in either form. Raises DataError for others."""
    unknown = sorted(set(raw) - KEYS)
    if unknown:
        raise DataError(f"unknown keys {unknown}: known are {sorted(KEYS)}")
    if ("messages" in raw) == ("conversations" in raw):
        raise DataError('give either "messages" or "conversations"')
    paths = {modality: _paths(raw, modality) for modality in LISTS}
    listed = {modality: iter(of) for modality, of in paths.items() if of is not None}
    if "messages" in raw:
        said = [_message(one, "role", "content", ROLES, listed) for one in _listed(raw, "messages")]
    else:
        said = [
            _message(one, "from", "value", SHAREGPT_ROLES, listed) for one in _listed(raw, "conversations")
        ]
    for modality, rest in listed.items():
        if left := list(rest):
            raise DataError(f'"{LISTS[modality]}" has {left} besides those that stand in messages')
    system = raw.get("system") if "conversations" in raw else None
    return [{"role": "system", "content": system}, *said] if isinstance(system, str) and system else said


def items_of(messages: list[Message]) -> list[tuple[str, str]]:
    """Modality and path of all items, in their order."""
    parts = [
        part for message in messages if isinstance(message["content"], list) for part in message["content"]
    ]
    return [(part["type"], part[part["type"]]) for part in parts if part["type"] != "text"]


def _listed(raw: Mapping[str, Any], key: str) -> list[Any]:
    if not isinstance(raw[key], list) or not raw[key]:
        raise DataError(f'"{key}" must be a list of messages, and not empty')
    return raw[key]


def _paths(raw: Mapping[str, Any], modality: str) -> list[str] | None:
    """What a line lists of a modality, None if it has no list: tags are text then."""
    key = LISTS[modality]
    found = raw.get(key)
    if modality == "image" and isinstance(raw.get("image"), str) and found is None:
        found = [raw["image"]]
    if found is not None and not (isinstance(found, list) and all(isinstance(path, str) for path in found)):
        raise DataError(f'"{key}" is {str(found)[:60]}: it must be a list of paths')
    return found


def _message(
    one: Any, role: str, content: str, roles: Mapping[str, str], listed: Mapping[str, Iterator[str]]
) -> Message:
    if not isinstance(one, dict) or one.get(role) not in roles:
        shown = one.get(role) if isinstance(one, dict) else one
        raise DataError(f'unknown "{role}" {shown!r} of a message: known are {", ".join(roles)}')
    rest = {key: value for key, value in one.items() if key not in (role, content)}
    if beside := sorted(key for key in {"image", "audio", *LISTS.values()} if rest.get(key)):
        raise DataError(f"a message has {beside} of its own: list files beside messages, or in its content")
    return {**rest, "role": roles[one[role]], "content": _content(one.get(content), listed)}


def _content(content: Any, listed: Mapping[str, Iterator[str]]) -> str | list[dict[str, str]]:
    given = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    parts = [own for part in given for own in _parts(part, listed)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _parts(part: Any, listed: Mapping[str, Iterator[str]]) -> Iterator[dict[str, str]]:
    """A part of a content in our form; a text is cut at the tags that stand for listed items."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        tags = "|".join(f"<{modality}>" for modality in listed)
        for piece in re.split(f"({tags})", part["text"]) if tags else [part["text"]]:
            modality = piece[1:-1]
            if piece == f"<{modality}>" and modality in listed:
                yield {"type": modality, modality: _next(modality, listed)}
            elif piece:
                yield {"type": "text", "text": piece}
        return
    modality = _NESTED.get(str(kind), kind)
    if modality not in LISTS:
        raise DataError(
            f"a content of {str(part)[:60]!r} is not taken: parts are text, image and audio, these by path"
        )
    path = part.get(str(kind), part.get("path"))
    path = path.get("url", path.get("path")) if isinstance(path, dict) else path
    if path is None:
        path = _next(modality, listed)
    if not isinstance(path, str) or "://" in path or path.startswith("data:"):
        raise DataError(f"an {modality} is {str(path)[:60]!r}: name a file by its path")
    yield {"type": modality, modality: path}


def _next(modality: str, listed: Mapping[str, Iterator[str]]) -> str:
    path = next(listed.get(modality, iter(())), None)
    if path is None:
        raise DataError(f'messages hold more items of {modality} than "{LISTS[modality]}" lists')
    return path
