"""Chats by a model's own template: the text that it writes of messages, and which of it the model says.

A template is untrusted: it runs in jinja2's sandbox. What the model says are its `{% generation %}` blocks;
where it has none, marks are put around what assistants say and the rendering is compared with the plain one.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from dataloader.format import DataError

Message = Mapping[str, Any]
Spans = tuple[tuple[int, int], ...]
_START, _STOP = "\ue000", "\ue001"  # private-use characters: taken out again once their places are known
_BLOCK = re.compile(r"{%[-+]?\s*generation\b")
_PROBE = "hello there"
_NOT_MARKED = ("tool_calls", "reasoning", "reasoning_content", "thinking")


class ChatTemplate:
    """A template with the tokens that it may name, such as `bos_token`, and the `today` of `strftime_now`.

    `takes_parts` says whether a content may be a list of parts, `needs_parts` whether it must: texts are
    handed to it so. Raises DataError if jinja2 is not there or the template is not valid.
    """

    def __init__(self, source: str, names: Mapping[str, str], today: str = "") -> None:
        self.source = source
        self.has_blocks = _BLOCK.search(source) is not None
        self._names = names
        self._template = _compiled(source, today)
        self.needs_parts = False
        as_text, as_parts = map(self._tried, (_PROBE, [{"type": "text", "text": _PROBE}]))
        # One that knows no parts may write the list as Python or JSON does, with its texts quoted.
        quoted = any(f"{quote}{_PROBE}{quote}" in as_parts for quote in "'\"")
        self.takes_parts = _PROBE in as_parts and not quoted
        self.needs_parts = self.takes_parts and _PROBE not in as_text

    def render(self, messages: Sequence[Message], tools: Any = None, asks: bool = False) -> tuple[str, Spans]:
        """The text, and the spans of its characters that stand in generation blocks. If it `asks`, what
        begins an assistant's turn comes last (`add_generation_prompt`).

        Raises DataError saying what the template raised.
        """
        marked = self._render(messages, tools, asks)
        if self.has_blocks:
            return _unmarked(marked)
        return marked, ()

    def targets(
        self, messages: Sequence[Message], special: Collection[str], tools: Any = None
    ) -> tuple[str, Spans]:
        """The text, and the spans that the model says: generation blocks, else what assistants say, each with
        the one special token that closes it.

        Raises DataError if there is nothing, or not all, to be told apart.
        """
        _check(messages)
        text, spans = self.render(messages, tools)
        if not self.has_blocks:
            said = self._said(messages, text, tools)
            spans = tuple((start, _closed(text, stop, special)) for start, stop in said)
        spans = joined(spans)
        if not spans:
            raise DataError("the template's generation blocks hold nothing: no token would carry loss")
        if sum(stop - start for start, stop in spans) == len(text):
            raise DataError("all of the text is in targets: the template tells no turn from another")
        return text, spans

    def prompt(self, messages: Sequence[Message], tools: Any = None) -> str:
        """The text after which the model goes on, with what begins its turn: as the template writes that for
        prompts or, if it knows no prompts, before what an assistant says.

        Raises DataError as `render` does.
        """
        plain, asking = (self.render(messages, tools, asks)[0] for asks in (False, True))
        if asking != plain:
            return asking
        text, spans = self._answered(messages, (), tools)
        begun = text[: spans[-1][0]] if spans else ""
        # Of white space alone a tokenizer makes one token with the word that is to come.
        return begun if begun.startswith(plain) and begun[len(plain) :].strip() else plain

    def closing(self, messages: Sequence[Message], special: Collection[str], tools: Any = None) -> str | None:
        """The special token that ends what a model says after these messages, None if none can be told."""
        text, spans = self._answered(messages, special, tools)
        said = text[slice(*spans[-1])].rstrip() if spans else ""
        return max((token for token in special if said.endswith(token)), key=len, default=None)

    def _answered(
        self, messages: Sequence[Message], special: Collection[str], tools: Any
    ) -> tuple[str, Spans]:
        """As `targets`, of messages and a word more that an assistant says; no spans if it has none."""
        try:
            return self.targets([*messages, {"role": "assistant", "content": "x"}], special, tools)
        except DataError:  # it is for answers that are given, which nobody asks for here
            return "", ()

    def _said(self, messages: Sequence[Message], plain: str, tools: Any) -> Spans:
        """Where the contents of assistants stand: marks at their edges, else within their white space."""
        turns = [message for message in messages if message["role"] == "assistant"]
        unclear = sorted({key for turn in turns for key in _NOT_MARKED if turn.get(key)})
        if unclear:
            raise DataError(
                f"an assistant's message has {unclear}, and the template no generation blocks, which alone "
                "say what of it is a target: give one that has them (template: FILE of the tokenizer)"
            )
        for wrap in (_edges, _within):
            marked = [_wrapped(message, wrap) for message in messages]
            text, spans = _unmarked(self._render(marked, tools))
            if text == plain and len(spans) == len(turns):
                return spans
        raise DataError(
            f"the template writes what {len(turns)} assistant messages say otherwise than they are given, so "
            "their places are not known: give one with generation blocks (template: FILE of the tokenizer)"
        )

    def _tried(self, content: Any) -> str:
        try:
            return self._render([{"role": "user", "content": content}], None)
        except DataError:
            return ""

    def _render(self, messages: Sequence[Message], tools: Any, asks: bool = False) -> str:
        if self.needs_parts:
            messages = [_in_parts(message) for message in messages]
        try:
            text: str = self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=asks, **self._names
            )
        except Exception as error:  # a stranger's template raises what it likes
            raise DataError(f"the chat template raised {type(error).__name__}: {error}") from error
        return text


def _compiled(source: str, today: str) -> Any:
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise DataError(
            f"chat templates need the package jinja2 ({error}): pip install 'omni-train[open]'"
        ) from error

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return _START + caller() + _STOP

    def refuse(message: str) -> None:
        raise ValueError(message)

    def strftime_now(form: str) -> str:
        from datetime import date

        return (date.fromisoformat(today) if today else date.today()).strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.globals.update(raise_exception=refuse, strftime_now=strftime_now)
    environment.filters["tojson"] = _to_json
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise DataError(f"the chat template is not valid: {error}") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """As templates expect it: without the escapes of HTML that jinja2's own has."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _check(messages: Sequence[Message]) -> None:
    turns = [message for message in messages if message["role"] == "assistant"]
    if not turns:
        roles = sorted({message["role"] for message in messages})
        raise DataError(f"no message is an assistant's (there are {roles}): nothing would carry loss")
    texts = [text for message in messages for text in _texts(message.get("content"))]
    if any(mark in text for text in texts for mark in (_START, _STOP)):
        raise DataError("a message holds U+E000 or U+E001, which mark targets here: take them out")


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or () if part.get("type") == "text"]


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _edges(text: str) -> str:
    return _START + text + _STOP


def _within(text: str) -> str:
    core = text.strip()
    before, _, after = text.partition(core)
    return before + _START + core + _STOP + after


def _wrapped(message: Message, wrap: Callable[[str], str]) -> Message:
    content = message.get("content")
    if message["role"] != "assistant" or not content:
        return message
    if isinstance(content, str):
        return {**message, "content": wrap(content)}
    parts = [{**part, "text": wrap(part["text"])} if part.get("type") == "text" else part for part in content]
    return {**message, "content": parts}


def _unmarked(marked: str) -> tuple[str, Spans]:
    """The text without marks, and what stood between them."""
    text, spans, start = "", [], None
    for part in re.split(f"([{_START}{_STOP}])", marked):
        if part == _START and start is None:
            start = len(text)
        elif part == _STOP and start is not None:
            spans.append((start, len(text)))
            start = None
        elif part in (_START, _STOP):
            raise DataError(
                "generation blocks stand inside one another, or the template cuts what an assistant says"
            )
        else:
            text += part
    if start is not None:
        raise DataError("the template cuts what an assistant says: give one with generation blocks")
    return text, tuple(spans)


def joined(spans: Spans) -> Spans:
    """Spans without those that are empty, neighbours that touch as one: what somebody says in two blocks."""
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


def _closed(text: str, stop: int, special: Collection[str]) -> int:
    """The end of the special token that stands at `stop`, after white space perhaps; `stop` if none does."""
    at = stop + len(text[stop:]) - len(text[stop:].lstrip())
    found = [token for token in special if text.startswith(token, at)]
    return at + len(max(found, key=len)) if found else stop


def ends_of_turns(messages: Sequence[Message], text: str, spans: Spans) -> tuple[int, ...]:
    """Where turns of assistants end in a text of which they say `spans`: after each, if they are one for each
    of their messages and hold its content. A turn may else lie in several, and only the end of all is known.
    """
    said = [_texts(message.get("content")) for message in messages if message["role"] == "assistant"]
    held = [text[start:stop] for start, stop in spans]
    one_each = len(said) == len(held) and all(
        part.strip() in own for parts, own in zip(said, held, strict=True) for part in parts
    )
    return tuple(stop for _, stop in (spans if one_each else spans[-1:]))
