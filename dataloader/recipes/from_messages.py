"""A dataset from chats, one a line, written by the tokenizer's template; what assistants say is target."""

import json
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from dataloader.chat import ChatTemplate, Message, ends_of_turns
from dataloader.format import DataError, Frame, Sample, TextForm
from dataloader.recipes.from_jsonl import add_lines, recipe_of
from dataloader.tokenizer import Tokenizer, digest_of
from dataloader.tokens import text_tokens
from dataloader.writer import DatasetWriter, is_intact

ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "tool": "tool", "observation": "tool",
}  # fmt: skip
_KEYS = {"id", "messages", "conversations", "system", "tools"}
# The template writes what begins and ends a text.
_FRAME = Frame(bos=False, end_of_item=False, eos=False, turns=True)


def build_from_messages(
    jsonl: str | Path,
    out: str | Path,
    tokenizer: Tokenizer,
    overwrite: bool = False,
    skip_bad: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> bool:
    """Build the dataset `out` from the chats of `jsonl`; False if it is there, built from the same.

    A line is {"messages": [{"role": …, "content": …}, …]} or {"conversations": [{"from": …, "value": …}, …]},
    with "id", "tools" and, beside conversations, "system" if need be. Contents are text. `tell` and bad lines
    are as in `build_from_jsonl`.

    Raises DataError naming the file and its bad lines, or a tokenizer without template.
    """
    if not tokenizer.template:
        raise DataError(
            f"tokenizer {tokenizer.name} has no chat template: name one that has, or its file, such as "
            "--tokenizer '{name: hf, path: DIR, template: FILE}'"
        )
    today = str(date.today()) if "strftime_now" in tokenizer.template else ""
    names = getattr(tokenizer, "names", {})
    template = ChatTemplate(tokenizer.template, names, today)
    form = TextForm(tokenizer.digest, digest_of(tokenizer.template), _FRAME)
    recipe = f"messages {recipe_of(jsonl)} template={form.template[:16]} {today}".rstrip()
    if not overwrite and is_intact(out, recipe, tokenizer, form):
        return False
    tell(f"building {out} from {jsonl} ...")
    with DatasetWriter(out, tokenizer, overwrite=overwrite, recipe=recipe, text=form) as writer:
        for text in add_lines(
            Path(jsonl), lambda line, number: _sample(line, number, template, tokenizer), writer, skip_bad
        ):
            tell(f"left out {text}")
    return True


def _sample(line: bytes, number: int, template: ChatTemplate, tokenizer: Tokenizer) -> Sample:
    raw = json.loads(line)
    if not isinstance(raw, dict):
        raise DataError("the line is not a JSON object")
    messages = messages_of(raw)
    text, targets = template.targets(messages, tokenizer.special, raw.get("tools"))
    turns = ends_of_turns(messages, text, targets)
    sample = Sample(str(raw.get("id", number)), text, (), targets, turns)
    counted = text_tokens(sample, tokenizer).targets
    if not counted.any() or counted.all():
        raise DataError(
            f"{counted.sum()} of its {len(counted)} tokens carry loss: some must, and not all may"
        )
    return sample


def messages_of(raw: Mapping[str, Any]) -> list[Message]:
    """The messages of a line in either form, in that of `messages`. Raises DataError for others."""
    unknown = sorted(set(raw) - _KEYS)
    if unknown:
        raise DataError(f"unknown keys {unknown}: known are {sorted(_KEYS)}")
    if ("messages" in raw) == ("conversations" in raw):
        raise DataError('give either "messages" or "conversations"')
    if "messages" in raw:
        return [_message(one, "role", "content", ROLES) for one in _listed(raw, "messages")]
    said = [_message(one, "from", "value", SHAREGPT_ROLES) for one in _listed(raw, "conversations")]
    system = raw.get("system")
    return [{"role": "system", "content": system}, *said] if isinstance(system, str) and system else said


def _listed(raw: Mapping[str, Any], key: str) -> list[Any]:
    if not isinstance(raw[key], list) or not raw[key]:
        raise DataError(f'"{key}" must be a list of messages, and not empty')
    return raw[key]


def _message(one: Any, role: str, content: str, roles: Mapping[str, str]) -> Message:
    if not isinstance(one, dict) or one.get(role) not in roles:
        shown = one.get(role) if isinstance(one, dict) else one
        raise DataError(f'unknown "{role}" {shown!r} of a message: known are {", ".join(roles)}')
    rest = {key: value for key, value in one.items() if key not in (role, content)}
    return {**rest, "role": roles[one[role]], "content": _text_of(one.get(content))}


def _text_of(content: Any) -> str:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise DataError(f"a content of {str(part)[:60]!r} is not taken: messages hold text alone")
    return "".join(part["text"] for part in parts)
