"""What a user does with a checkpoint: held-out losses are the run's own, answers are the model's."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from ranks import RankPool
from small import overrides, write_mixed
from tiny_bpe import write_tokenizer
from torch.distributed import HashStore

from dataloader.format import DataError, Sample
from dataloader.prompts import of_messages, of_texts
from dataloader.storage import Storage
from dataloader.tokenizer import ByteTokenizer, get_tokenizer
from dataloader.writer import DatasetWriter
from infra.checkpoint import Keep, claim, file_of, folder_of, save_checkpoint
from infra.run_folder import RunFolder, read_metrics, read_summary, write_text
from infra.shard_file import pack
from omni.__main__ import main
from omni.commands import eval as eval_command
from omni.commands._of_checkpoint import checkpoint_of, configured, resolved
from omni.compose import compose_config
from omni.config import Config
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.training.of_checkpoint import evaluated, generated
from omni.training.reporter import Silent
from omni.training.task import Task
from omni.training.trainer import Trainer
from parallel.control import Control
from parallel.control_tree import Tree

GENERATE = 8
LAYOUTS: dict[str, list[str]] = {
    "as trained": [],
    "one rank": ["launch.ranks=1", "layout.llm.tp=1"],
    "two stages": ["layout.llm.tp=1", "layout.llm.pp=2"],
    "data parallel": ["layout.llm.tp=1"],
}


def _train(rank: int, config: Config) -> None:
    spec = prepare_run(config, 2)
    Trainer(spec, RunFolder.create(Path(spec.config.run.dir)), rank, torch.device("cpu")).run()


@pytest.fixture(scope="module")
def run(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps at a constant rate, with a checkpoint after every other one."""
    folder = tmp_path_factory.mktemp("of_checkpoint")
    write_mixed(folder / "mixed")
    with DatasetWriter(folder / "text", ByteTokenizer()) as writer:
        writer.add(Sample("a", "no picture"))
    keys = ["train.steps=4", "train.checkpoint_every=2", "train.eval_every=2", "launch.ranks=2"]
    keys += ["optim.schedule=wsd", "optim.decay_steps=1", "optim.warmup_steps=0", "layout.llm.tp=2"]
    keys += [f"+data.heldout.{name}.path={folder / name}" for name in ("mixed", "text")]
    keys += [f"+data.heldout.{name}.generate={GENERATE}" for name in ("mixed", "text")]
    keys += [f"+data.heldout.{name}.generate_tokens=6" for name in ("mixed", "text")]
    config = compose_config(overrides(folder / "mixed", folder / "run", *keys))
    write_text(
        RunFolder.create(folder / "run").config, OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)
    )
    ranks.run(2, _train, config)
    (folder / "mixed").rename(folder / "elsewhere")  # what is trained on is gone
    return folder / "run"


def arguments(run: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    eval_command.add_arguments(parser)
    return parser.parse_intermixed_args([str(run), *words])


def _does(rank: int, config: Config, world: int, task: Task, folder: Path) -> dict[str, Any]:
    """A task, as a rank does it."""
    spec = prepare_run(config, world, task.trace)
    trainer = Trainer(spec, RunFolder.create(folder), rank, torch.device("cpu"))
    trainer.saving.restore()
    step = 0  # a label
    result = generated(trainer, step, task, Silent()) if task.prompts else evaluated(trainer, step, Silent())
    trainer.close()
    return result


def done(ranks: RankPool, spec: RunSpec, task: Task, folder: Path) -> list[dict[str, Any]]:
    world = spec.arrangement.world
    return ranks.run(world, _does, spec.config, world, task, folder)


def evaluation(ranks: RankPool, run: Path, folder: Path, *words: str) -> dict[str, Any]:
    """What `omni eval` finds, by its own steps but for the start of ranks."""
    moved = [f"data.heldout.mixed.path={run.parent / 'elsewhere'}"]
    spec = resolved(eval_command.evaluating(configured(arguments(run, *moved, *words))), Task())
    found = done(ranks, spec, Task(), folder)
    assert all(of == found[0] for of in found), "all ranks know the same"
    return found[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_evaluation_is_the_last_one_of_its_run(
    ranks: RankPool, run: Path, tmp_path: Path, layout: str
) -> None:
    found = evaluation(ranks, run, tmp_path, *LAYOUTS[layout])
    summary = read_summary(run / "summary.json")
    for name in ("mixed", "text"):
        assert found[f"loss/eval/{name}"] == pytest.approx(summary[f"loss/eval/{name}"], rel=1e-6)
        assert found[f"eval/generated/{name}"] == summary[f"eval/generated/{name}"] > 0
        assert found[f"eval/examples/{name}"] == summary[f"eval/examples/{name}"]


def test_a_step_names_its_checkpoint_and_nothing_is_written_to_the_run(
    ranks: RankPool, run: Path, tmp_path: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    own = {
        of["progress/step"]: of["loss/eval/mixed"]
        for of in read_metrics(run / "metrics.jsonl")
        if "loss/eval/mixed" in of
    }
    assert abs(own[2] - own[4]) > 1e-3
    only = ["~data.heldout.text", "data.heldout.mixed.generate=0"]
    found = evaluation(ranks, run, tmp_path, "--step", "2", *only)
    assert found == {"loss/eval/mixed": pytest.approx(own[2], rel=1e-6)}
    spec = configured(arguments(run / "checkpoints" / "step_00000002"))
    assert spec.start.checkpoint == configured(arguments(run, "--step", "2")).start.checkpoint
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_answers_are_what_the_run_transcribed(ranks: RankPool, run: Path, tmp_path: Path) -> None:
    (example,) = read_summary(run / "summary.json")["eval/examples/text"]
    asked = of_texts(["", "no pic"], ByteTokenizer())
    task = Task.of(asked, 6)
    for words in (["layout.llm.tp=1", "layout.llm.pp=2"], ["launch.ranks=1", "layout.llm.tp=1"]):
        config = configured(
            arguments(run, *words, "~data.sources.mixed", "~data.heldout.mixed", "~data.heldout.text")
        )
        spec = resolved(config, task)
        found = done(ranks, spec, task, tmp_path / words[0])[0]["answers"]
        assert ByteTokenizer().decode(found["0"]) == example["generated"]
        assert sorted(found) == ["0", "1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval", "{}/nothing"], "is neither a run folder"),
        (["eval", "{}", "--step", "3"], "there are: step_00000002, step_00000004"),
        (["eval", "{}/checkpoints/step_00000002", "--step", "4"], "is that of step 2"),
        (["eval", "{}", "~data.heldout.mixed", "~data.heldout.text"], "data.heldout is empty"),
        (["eval", "{}"], "data.heldout.mixed.path="),
        (["eval", "{}", "--out", "{}"], "is a folder: name a file"),
        (["eval", "{}", "start.cursor=3"], "start is another"),
        (["eval", "{}", "hydra/launcher=slurm"], "on this machine alone"),
        (["generate", "{}", "--prompt", "a", "model.llm.hidden=96"], "another model: model.llm.hidden=96"),
        (["generate", "{}", "--prompt", "a", "launch.ranks=3"], "does not divide the 3 ranks"),
        (["generate", "{}", "--prompt", "a" * 161], "has 162 tokens, and a sample of this run at most 160"),
        (["generate", "{}", "--prompt", "a", "--tokens", "0"], "--tokens 0"),
        (["generate", "{}", "--prompt", "\ufffc"], "prompts are of text alone"),
        (["generate", "{}", "--messages", "{}/config.yaml"], "tokenizer bytes has no chat template"),
        (
            ["generate", "{}", "--prompt", "a", "+model.encoders.sound={{name: audio}}"],
            "model.encoders.sound: .*has no weights for it",
        ),
        (
            ["generate", "{}", "--prompt", "a", "data.tokenizer={{name: hf, path: {}/bpe}}"],
            "makes other tokens than .* has learnt",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named_before_ranks_start(
    run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "hf" in str(words) and not (run / "bpe").exists():
        write_tokenizer(run / "bpe")
    assert main([word.format(run) for word in words]) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert re.search(message, said.err), said.err


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def no_items(modality: str, size: tuple[int, ...]) -> tuple[int, int]:
    raise AssertionError(f"an {modality} of {size}")


def test_chats_become_prompts_that_end_where_a_turn_is_closed(tmp_path: Path) -> None:
    tokenizer = get_tokenizer({"name": "hf", "path": str(write_tokenizer(tmp_path / "bpe", CHATML))})
    file = tmp_path / "chats.jsonl"
    turn = {"role": "user", "content": "hello there"}
    lines = [{"messages": [turn]}, {"id": "b", "conversations": [{"from": "human", "value": "hello there"}]}]
    file.write_text("".join(json.dumps(line) + "\n\n" for line in lines))
    one, two = of_messages(file, tokenizer, no_items)
    text = "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"
    assert one.ids == two.ids == tuple(tokenizer.encode(text).ids.tolist())
    assert one.ends == {tokenizer.eos, tokenizer.special["<|im_end|>"]}
    assert (one.name, two.name, one.given) == ("1", "b", {"messages": [turn]})
    bad = [{"messages": [turn, {"role": "assistant", "content": "x"}]}, {"messages": "x"}, []]
    file.write_text("".join(json.dumps(line) + "\n" for line in bad))
    with pytest.raises(DataError) as error:
        of_messages(file, tokenizer, no_items)
    for number, what in enumerate(("the last word", "a list of messages", "not a JSON object"), 1):
        assert re.search(rf"chats.jsonl:{number}: .*{what}", str(error.value))
    for content, what in (("\n", "no chat in it"), (None, "No such file")):
        file.unlink() if content is None else file.write_text(content)
        with pytest.raises(DataError, match=what):
            of_messages(file, tokenizer, no_items)
    with pytest.raises(DataError, match="say something"):
        of_texts([""], get_tokenizer({"name": "hf", "path": str(tmp_path / "bpe")}))


def test_a_newest_checkpoint_that_is_damaged_is_passed_over_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, alone = RunFolder.create(tmp_path), Control(0, Tree(1, 1), HashStore(), b"", 5)
    storage = Storage.at(folder.checkpoints)
    run = claim(storage, None)
    for step in (1, 2):
        save_checkpoint(storage, run, step, pack({"weight": torch.ones(3)}, {}), {}, Keep(2), alone)
    (folder.checkpoints / folder_of(2) / file_of(0)).write_bytes(b"")
    _, manifest = checkpoint_of(folder, compose_config([]), None)
    assert manifest["step"] == 1
    said = capsys.readouterr().err
    assert "warning: step_00000002 is passed over: step_00000002/rank_00000.safetensors has 0 bytes" in said
