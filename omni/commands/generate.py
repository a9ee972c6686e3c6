"""`omni generate`: what the model of a checkpoint answers."""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni.commands._of_checkpoint import add_checkpoint, configured, resolved, run_ranks
from omni.commands._out import make_room, writing

if TYPE_CHECKING:
    from dataloader.item_counts import ItemCounts
    from dataloader.prompts import Asked
    from dataloader.tokenizer import Tokenizer
    from omni.config import Config
    from omni.planning.run_spec import RunSpec
    from omni.training.task import Task

_DESCRIPTION = """\
Goes on with texts, or answers chats, by the likeliest token each time: under the configuration of the
checkpoint's run with any overrides, and with its tokenizer and chat template. No dataset is needed.

  omni generate runs/mine --prompt "def add(" --prompt "import" --tokens 64
  omni generate runs/tuned --messages chats.jsonl --out answers.jsonl launch.ranks=2 layout.llm.tp=2

A line of --messages is {"messages": [{"role": "user", "content": "Two and two?"}]}, with "id", "tools",
"conversations" and items, which lie below the file's folder, as in `omni data build --from-messages`; an item
is encoded once. A text is tokenized as it stands, without template.
An answer ends with the tokenizer's eos or the token that closes what an assistant says, after --tokens, or
where it and its prompt are as long as a sample may be. Generation ends after train.generate_s seconds and
when a signal asks to stop; answers that are whole are kept.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a text to go on with; may be repeated"
    )
    asked.add_argument("--messages", type=Path, metavar="FILE", help="chats to answer, JSONL")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most (default: 128)")
    add_checkpoint(parser, "write the answers here, a JSON object a line")


def run(arguments: argparse.Namespace) -> int:
    """Answer. The exit code is that of the ranks, 1 if some answers are missing, 2 for a user's mistake."""
    from infra.run_folder import write_text

    parent = os.getppid()  # before anything that takes time: whoever started this may end meanwhile
    try:
        config = configured(arguments)
        config = replace(config, data=replace(config.data, sources={}, heldout={}))
        asked, task = _asked(arguments, config)
        spec = resolved(config, task)
        _check_lengths(asked, spec)
        code, result = run_ranks(spec, task, parent)
        if result is None:
            return code
        answers = [*_answers(asked, result["answers"], spec.tokenizer)]
        for answer in answers:
            print(_shown(answer), flush=True)
        if arguments.out is not None:
            with writing("--out", arguments.out):
                write_text(make_room(arguments.out), "".join(map(_line, answers)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code or int(len(answers) < len(asked))


def _asked(arguments: argparse.Namespace, config: "Config") -> "tuple[list[Asked], Task]":
    """What is asked, and what ranks are to do."""
    from dataloader.prompts import of_messages, of_texts
    from omni.config import ConfigError
    from omni.planning.run_data import tokenizer_of
    from omni.training.task import Task

    if arguments.tokens < 1:
        raise ConfigError(f"--tokens {arguments.tokens}: must be at least 1")
    tokenizer = tokenizer_of(config.data)
    if arguments.prompt is not None:
        asked = of_texts(arguments.prompt, tokenizer)
    else:
        asked = of_messages(arguments.messages, tokenizer, _counts_of(config))
    return asked, Task.of(asked, arguments.tokens)


def _counts_of(config: "Config") -> "ItemCounts":
    """Return what the encoders of a run make of items; they are made when the first is asked for."""
    from dataloader.format import SampleError
    from omni.planning.prepare import make_encoders
    from omni.planning.run_spec import item_count

    made = cache(partial(make_encoders, config.model.encoders))

    def counts(modality: str, size: tuple[int, ...]) -> tuple[int, int]:
        if modality not in (taken := [encoder.modality for encoder in made().values()]):
            raise SampleError(
                f"no encoder of the run takes an {modality} (there are encoders for: "
                f"{', '.join(taken) or 'nothing'}): ask without"
            )
        return item_count(made(), modality, size)

    return counts


def _check_lengths(asked: "Sequence[Asked]", spec: "RunSpec") -> None:
    """Refuse a prompt after which the run takes no token more."""
    from omni.config import ConfigError

    longest = spec.planner.world.budget.longest
    for each in asked:
        if len(each.ids) > longest:
            raise ConfigError(
                f"prompt {each.name} has {len(each.ids)} tokens, and a sample of this run at most {longest}: "
                f"shorten it, or raise data.microbatch_tokens={spec.config.data.microbatch_tokens} and "
                f"data.sample_tokens={spec.config.data.sample_tokens} beyond what the model has learnt"
            )


def _answers(
    asked: "Sequence[Asked]", found: Mapping[str, Sequence[int]], tokenizer: "Tokenizer"
) -> Iterator[dict[str, Any]]:
    """The answers that came to their end, beside what was asked."""
    for number, each in enumerate(asked):
        tokens = found.get(str(number))
        if tokens is not None:
            ended = tokens[-1] in each.ends
            text = tokenizer.decode(tokens[:-1] if ended else tokens)
            more = {"answer": text, "tokens": len(tokens), "finish": "stop" if ended else "length"}
            yield {"id": each.name, **each.given, **more}


def _shown(answer: Mapping[str, Any]) -> str:
    from dataloader.visible import visible

    asked = answer["prompt"] if "prompt" in answer else _said(answer["messages"][-1]["content"])
    cut = " …" if answer["finish"] == "length" else ""
    return f"{answer['id']}: {visible(asked)}\n  {visible(answer['answer'])}{cut}"


def _said(content: Any) -> str:
    """A content as text, with the names of its items."""
    if isinstance(content, str):
        return content
    return "".join(
        part["text"] if part["type"] == "text" else f"[{part[part['type']]}] " for part in content or ()
    )


def _line(answer: Mapping[str, Any]) -> str:
    import json

    return json.dumps(answer, ensure_ascii=False) + "\n"
