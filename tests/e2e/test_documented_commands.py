"""Commands of README.md, CONTRIBUTING.md and docs/*.md run as printed, on small data by the same names."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from documented import (
    LESS,
    NOT_RUN,
    RANKS,
    REFUSED,
    ROOT,
    commands,
    pages,
    runs_by_itself,
    split,
    unaccounted,
    why_not,
)
from runs import Finished, Running, document, omni, picture, strip, write
from tars import write_tars
from tiny_bpe import write_tokenizer

from dataloader.format import PLACEHOLDER, Sample

PRINTED = list(dict.fromkeys(command for found in pages().values() for command in found))
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
BUILD = "omni data build --from-jsonl mine.jsonl --out data/mine"
INDEX = "omni data index data/tars --out data/tars_index --recipe webdataset --jobs 4"
ALONE = [command for command in PRINTED if runs_by_itself(command)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder: small datasets under the quickstart's names, and what pages call the reader's."""
    folder = tmp_path_factory.mktemp("reader")
    for name, sample in (("strips", strip), ("docs", document)):
        for use in ("train", "heldout"):
            write(folder / "data/quickstart" / f"{name}_{use}", [sample(i) for i in range(64)])
    (folder / "seven.png").write_bytes(picture([7]).data)
    line = r'{"id": "seven-%d", "text": "\ufffcseven", "items": [{"modality": "image", "path": "seven.png"}]}'
    (folder / "mine.jsonl").write_text("".join(f"{line % i}\n" for i in range(8)))
    write_tokenizer(folder / "models/mine", CHAT)
    turns = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    for group, ours in (("cluster/mine", "cluster/cpu"), ("experiment/mine", "experiment/quickstart")):
        own = folder / "conf" / f"{group}.yaml"
        own.parent.mkdir(parents=True)
        shutil.copy(ROOT / "hydra_conf" / f"{ours}.yaml", own)
    seven = Sample("seven", PLACEHOLDER + "seven", (picture([7]),))
    write_tars(folder / "data/tars", [replace(seven, id=f"seven-{i}") for i in range(8)], each=4)
    (folder / "data/llava/images").mkdir(parents=True)
    (folder / "data/llava/images/seven.png").write_bytes(picture([7]).data)
    asked = {"from": "human", "value": "<image>Which digit?"}
    chat = {"image": "seven.png", "conversations": [asked, {"from": "gpt", "value": "Seven."}]}
    (folder / "data/llava/chats.json").write_text(json.dumps([chat] * 4))
    for command in (BUILD, INDEX):
        built = omni(split(command)[1:], folder)
        assert built.code == 0, built.err
    return folder


def test_commands_are_found_where_they_are_printed() -> None:
    page = "```bash\nomni plan a=1 \\\n  'b={c: 1}'   # what it says\n$ python x.py\nls\n```\n\nomni none\n"
    assert commands(page) == ["omni plan a=1 'b={c: 1}'", "python x.py"]
    assert len(PRINTED) > 50


def test_every_printed_command_is_run_or_says_why_not() -> None:
    missing = [f"{page}: {command}" for page, found in pages().items() for command in unaccounted(found)]
    assert missing == [], (
        "no test runs these commands of a page. In tests/e2e/documented.py add each to RANKS, with what to "
        "append so that it takes seconds, or to NOT_RUN, with the reason"
    )


def test_nothing_is_accounted_for_that_no_page_prints() -> None:
    assert [command for command in (*RANKS, *LESS, *REFUSED) if command not in PRINTED] == []
    everywhere = [command for command in PRINTED if why_not(command)]
    assert [key for key in NOT_RUN if not any(command.startswith(key) for command in everywhere)] == []


@pytest.mark.parametrize("command", ALONE)
def test_a_command_that_starts_no_ranks_does_what_it_says(folder: Path, command: str) -> None:
    words = [*split(command)[1:], *split(LESS.get(command, ""))]
    if "-m" in words and words[0] == "train" and "--help" not in words:
        words = [*words, "hydra/launcher=render", "launch.ranks=2"]
    done = omni(words, folder)
    code, said = REFUSED.get(command, (0, ""))
    assert done.code == code, done.err
    assert said in done.err
    assert "Traceback" not in done.err
    assert done.out or done.err


@pytest.mark.slow
@pytest.mark.timeout(1800)  # some thirty commands, one after the other
def test_commands_that_start_ranks_follow_one_another(folder: Path) -> None:
    """In the order of RANKS, each in what those before it left."""
    for command, more in RANKS.items():
        words = split(command)
        done: Finished = Running(["-m", *words, *split(more)], folder).finish()
        assert done.code == 0, f"{command}\n{done.out[-2000:]}\n{done.err[-4000:]}"
        assert "Traceback" not in done.err, command
