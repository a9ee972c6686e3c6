"""A dataset from chats, one a line, written by the tokenizer's template; what assistants say is target."""

import json
import re
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from dataloader.chat import ChatTemplate, Message, Spans, ends_of_turns
from dataloader.chat_items import targets_with_items
from dataloader.format import DataError, Sample, validate_sample
from dataloader.manifest import Frame, TextForm
from dataloader.recipes.from_jsonl import add_lines, item_of, recipe_of, tell_of_newer
from dataloader.recipes.messages import items_of, messages_of
from dataloader.tokenizer import Tokenizer, digest_of
from dataloader.tokens import text_tokens
from dataloader.writer import DatasetWriter, is_intact

# Of OpenAI's form, keys of a message that templates pass over, and that say nothing of what is learnt.
_NAMES = {"role", "content", "name", "tool_call_id"}
# The template writes what begins and ends a text.
FRAME = Frame(bos=False, end_of_item=False, eos=False, turns=True)


def build_from_messages(
    jsonl: str | Path,
    out: str | Path,
    tokenizer: Tokenizer,
    overwrite: bool = False,
    skip_bad: int = 0,
    tell: Callable[[str], None] = lambda text: None,
    root: str | Path | None = None,
) -> bool:
    """Build the dataset `out` from the chats of `jsonl`; False if it is there, built from the same.

    A line is {"messages": [{"role": …, "content": …}, …]} or {"conversations": [{"from": …, "value": …}, …]},
    with "id", "tools" and, beside conversations, "system" if need be. Contents are texts, or lists of parts
    as in `recipes/messages.py`. `tell`, bad lines, and where files lie (`root`) are as in `build_from_jsonl`.

    Raises DataError naming the file and its bad lines, or a tokenizer without template.
    """
    form = form_of(tokenizer)
    today = str(date.today()) if "strftime_now" in tokenizer.template else ""
    template = ChatTemplate(tokenizer.template, getattr(tokenizer, "names", {}), today)
    recipe = f"messages {recipe_of(jsonl)} template={form.template[:16]} {today}".rstrip()
    if not overwrite and is_intact(out, recipe, tokenizer, form):
        tell_of_newer(Path(jsonl), out, lambda raw: [path for _, path in items_of(messages_of(raw))], tell)
        return False
    tell(f"building {out} from {jsonl} ...")
    with DatasetWriter(out, tokenizer, overwrite=overwrite, recipe=recipe, text=form) as writer:
        folder = Path(jsonl).parent
        allowed = (folder if root is None else Path(root)).resolve()

        def parse(line: bytes, number: int) -> Sample:
            return _sample(line, number, template, tokenizer, folder, allowed)

        for text in add_lines(Path(jsonl), parse, writer, skip_bad):
            tell(f"left out {text}")
    return True


def form_of(tokenizer: Tokenizer) -> TextForm:
    """What the tokens of chats depend on. Raises DataError for a tokenizer without template."""
    if not tokenizer.template:
        raise DataError(
            f"tokenizer {tokenizer.name} has no chat template: name one that has, or its file, such as "
            "--tokenizer '{name: hf, path: DIR, template: FILE}'"
        )
    return TextForm(tokenizer.digest, digest_of(tokenizer.template), FRAME)


def text_of(
    messages: list[Message], tools: Any, template: ChatTemplate, tokenizer: Tokenizer
) -> tuple[str, Spans, tuple[int, ...]]:
    """What a template writes of messages, the spans that carry loss, and where turns end."""
    marks, around = getattr(tokenizer, "marks", {}), getattr(tokenizer, "around", {})
    text, targets = targets_with_items(template, messages, tokenizer.special, marks, tools, around)
    return text, targets, ends_of_turns(messages, text, targets)


def _sample(
    line: bytes, number: int, template: ChatTemplate, tokenizer: Tokenizer, folder: Path, allowed: Path
) -> Sample:
    raw = json.loads(line)
    if not isinstance(raw, dict):
        raise DataError("the line is not a JSON object")
    messages = messages_of(raw)
    text, targets, turns = text_of(messages, raw.get("tools"), template, tokenizer)
    if dropped := sorted({key for message in messages for key in _dropped(message, template)}):
        raise DataError(f"messages have {dropped}, of which the template writes nothing: take them out")
    items = (item_of({"modality": kind, "path": path}, folder, allowed) for kind, path in items_of(messages))
    sample = Sample(str(raw.get("id", number)), text, tuple(items), targets, turns)
    validate_sample(sample)
    counted = text_tokens(sample, tokenizer).targets
    if not counted.any() or counted.all():
        raise DataError(
            f"{counted.sum()} of its {len(counted)} tokens carry loss: some must, and not all may"
        )
    return sample


def _dropped(message: Message, template: ChatTemplate) -> list[str]:
    """Keys of a message that hold something and that its template does not know."""
    held = [key for key, value in message.items() if key not in _NAMES and value not in (None, "", [])]
    return [key for key in held if not re.search(rf"\b{re.escape(key)}\b", template.source)]
