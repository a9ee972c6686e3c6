"""Masks of chats under published templates: what of each text carries loss, beside what others make of it.

    pip download trl==1.16.0 --no-deps        # the templates; nothing here needs the package otherwise
    python benchmarks/chat_templates.py trl-1.16.0-py3-none-any.whl          # or a folder of it; seconds

NAME.jinja is the template that a model came with; NAME_training.jinja is trl's own twin of it, with
generation blocks around what is to be learnt. Of each template a line says

    text        whether transformers renders the same
    content     what it is given: a text, or a list of parts where it takes no text
    mask        by its own blocks, or by marks put around what assistants say
    spans       of so many answers; each holds one whole, and after it one token that closes it at most
    picture     the mark at which a picture stands, or that it stands in the text, of templates without one
    twin        whether our spans lie within its blocks, and what these hold before and after; not comparable
                if it writes another text

The last line is JSON; the exit code is 1 if a template has no such mask, or a span is not within its block.
"""

import argparse
import json
import re
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from dataloader.chat import ChatTemplate, Spans, joined
from dataloader.chat_items import targets_with_items
from dataloader.format import PLACEHOLDER, DataError

TWIN = "_training"
NAMES = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}
SPECIAL = re.compile(r"<[|｜]?[^<>\s]{2,40}?[|｜]?>|\[/?[A-Z_]{2,40}\]|<end_of_turn>")
"""What looks like a special token in a rendered text: there are templates here and no tokenizers."""
IMAGE_MARK = re.compile(r"<\|?(?:image(?:_pad|_soft_token)?|start_of_image|patch)\|?>")
ASKED = ("two and two?", "why?", "sure?")
TALKS = {
    "plain": ("it is four.", "by counting.", "yes\n\nquite."),
    "edges": (" it is four.\n", "by counting.\n\n", "\n yes"),
    "alike": ("why?", "two and two?", "two and two?"),  # what is asked before is said again
}


@dataclass
class Found:
    """What is known of a template; `wrong` says why it has no sound mask."""

    content: str = ""
    mask: str = ""
    spans: int = 0
    answers: int = 0
    same_text: bool = True
    picture: str = ""
    twin: str = "none"
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def line(self, name: str) -> str:
        """A row of the table."""
        edges = " ".join(f"{side} {json.dumps(of)}" for side, of in self._edges())
        row = f"{name:26} {'same' if self.same_text else 'OTHER':5} {self.content:7} {self.mask:6} "
        row += f"{self.spans:2} of {self.answers:2}  {self.picture:16} {self.twin} {edges}"
        return "\n    ".join([row.rstrip(), *(f"MISSED {why}" for why in self.wrong)])

    def _edges(self) -> Iterator[tuple[str, list[str]]]:
        for side, of in (("before", self.before), ("after", self.after)):
            if any(of):
                yield side, of


def main() -> int:
    """Compare every template, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trl", type=Path, metavar="WHEEL_OR_FOLDER", help="where chat_templates/ lies")
    parser.add_argument("--quick", action="store_true", help="one chat for each template")
    given, start = parser.parse_args(), time.perf_counter()
    release, sources = read(given.trl)
    talks = {"plain": TALKS["plain"]} if given.quick else TALKS
    print(f"{'template':26} text  content mask   spans     picture          twin")
    result = {}
    for name, source in sources.items():
        if not name.endswith(TWIN):
            result[name] = compared(source, sources.get(name + TWIN), talks)
            pictured(source, result[name])
            print(result[name].line(name), flush=True)
    missed = [name for name, found in result.items() if found.wrong]
    told = {
        "benchmark": "chat_templates",
        "trl": release,
        "templates": len(result),
        "masked": len(result) - len(missed),
        "by": Counter(found.mask for found in result.values()),
        "pictures": Counter(found.picture for found in result.values()),
        "twins": Counter(found.twin for found in result.values()),
        "of_each": {name: asdict(found) for name, found in result.items()},
        "missed": missed,
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(told))
    return int(bool(missed) or not result)


def read(given: Path) -> tuple[str, dict[str, str]]:
    """The release of a wheel, or of a folder of one, and its templates by name, in their order."""
    if given.is_dir():
        files = {str(file): file.read_bytes() for file in given.rglob("*") if _is_wanted(file)}
    else:
        with zipfile.ZipFile(given) as wheel:
            files = {name: wheel.read(name) for name in wheel.namelist() if _is_wanted(Path(name))}
    said = [content for name, content in files.items() if name.endswith("METADATA")]
    found = re.search(rb"^Version: (\S+)", said[0], re.MULTILINE) if len(said) == 1 else None
    templates = {Path(name).stem: of.decode() for name, of in files.items() if name.endswith(".jinja")}
    return found[1].decode() if found else "unknown", dict(sorted(templates.items()))


def _is_wanted(file: Path) -> bool:
    return file.suffix == ".jinja" or (file.name == "METADATA" and file.parent.name.startswith("trl-"))


def compared(source: str, twin: str | None, talks: Mapping[str, Sequence[str]]) -> Found:
    """What our masks are of chats that a template writes, and whether its twin's blocks hold them."""
    found = Found()
    verdicts = set()
    for name, answers in talks.items():
        found.answers += len(answers)
        try:
            messages, text, spans = masked(source, answers, found)
        except DataError as error:
            found.wrong.append(f"{name}: {error}")
            continue
        found.spans += len(spans)
        if text != rendered(source, messages)[0]:
            found.same_text = False
            found.wrong.append(f"{name}: transformers renders another text")
        own = [text[start:stop] for start, stop in spans]
        if len(own) != len(answers) or not all(map(is_answer, own, answers, [found.mask] * len(own))):
            found.wrong.append(f"{name}: {own} are not the answers {list(answers)}")
        elif twin is not None:
            verdicts.add(beside(twin, messages, text, spans, found))
    if verdicts:
        found.twin = next((of for of in ("outside", "within") if of in verdicts), min(verdicts))
    if "outside" in verdicts:
        found.wrong.append("a span is not within the twin's block")
    return found


def masked(source: str, answers: Sequence[str], found: Found) -> tuple[list[dict[str, Any]], str, Spans]:
    """A chat in the form that the template takes, its text, and what of it carries loss."""
    template = ChatTemplate(source, NAMES, str(date.today()))
    found.mask = "blocks" if template.has_blocks else "marks"
    found.content = "parts" if template.needs_parts else "text"
    messages = talk(answers)
    special = set(SPECIAL.findall(template.render(messages)[0]))
    text, spans = template.targets(messages, special)
    if template.needs_parts:
        messages = [{**of, "content": [{"type": "text", "text": of["content"]}]} for of in messages]
    return messages, text, spans


def talk(answers: Sequence[str]) -> list[dict[str, Any]]:
    """Questions and answers, in the form of OpenAI's messages."""
    turns = zip(ASKED, answers, strict=True)
    roles = ("user", "assistant")
    return [{"role": role, "content": of} for turn in turns for role, of in zip(roles, turn, strict=True)]


def pictured(source: str, found: Found) -> None:
    """Where the template puts a picture, beside what transformers renders; at the text itself if it has no
    mark of its own.
    """
    template = ChatTemplate(source, NAMES, str(date.today()))
    parts = [
        {"type": "text", "text": "see "},
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": "?"},
    ]
    answer = [{"type": "text", "text": "four"}] if template.needs_parts else "four"
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
    theirs = rendered(source, messages)[0] if template.takes_parts else ""
    marks = IMAGE_MARK.findall(theirs)
    try:
        text, _ = targets_with_items(template, messages, (), {"image": marks[0]} if marks else {})
    except DataError as error:
        found.wrong.append(f"picture: {error}")
        return
    found.picture = marks[0] if marks else "in text"
    if text.count(PLACEHOLDER) != 1 or (marks and text.replace(PLACEHOLDER, marks[0]) != theirs):
        found.wrong.append(f"picture: {text!r} beside {theirs!r}")


def is_answer(span: str, answer: str, mask: str) -> bool:
    """Whether a span holds an answer; one of marks nothing else but one token that closes it."""
    before, core, after = span.partition(answer.strip())
    if mask == "blocks":
        return bool(core)
    return bool(core) and not before.strip() and (not after.strip() or bool(SPECIAL.fullmatch(after.strip())))


def rendered(source: str, messages: list[dict[str, Any]]) -> tuple[str, Spans]:
    """The text that transformers makes, and the generation blocks that it finds."""
    blocks = bool(re.search(r"{%-?\s*generation\b", source))
    texts, spans = render_jinja_template(
        [messages], chat_template=source, return_assistant_tokens_mask=blocks, **NAMES
    )
    return texts[0], joined(tuple((start, stop) for start, stop in spans[0])) if blocks else ()


def beside(twin: str, messages: list[dict[str, Any]], text: str, spans: Spans, found: Found) -> str:
    """Whether each span lies in a block of the twin, if that writes the same text."""
    other, blocks = rendered(twin, messages)
    if other != text:
        return "other text"
    for start, stop in spans:
        around = [(low, high) for low, high in blocks if low <= start < stop <= high]
        if not around:
            return "outside"
        ((low, high),) = around
        found.before = sorted({*found.before, text[low:start]})
        found.after = sorted({*found.after, text[stop:high]})
    return "within"


if __name__ == "__main__":
    sys.exit(main())
