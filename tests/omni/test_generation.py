"""Generation that keeps keys and values: token by token that of passes over all tokens, and transformers'."""

from pathlib import Path

import numpy as np
import pytest
import torch
from open_model_folders import make
from ranks import RankPool
from small import with_values

from dataloader.format import Sample
from dataloader.manifest import Frame
from dataloader.tokenizer import ByteTokenizer
from dataloader.tokens import SampleMeta
from dataloader.writer import DatasetWriter
from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.config import Config
from omni.planning.prepare import prepare_run
from omni.training.forward import ForwardPasses
from omni.training.generate import FreeGeneration, Prompt
from omni.training.trainer import Trainer
from parallel.memory import Memory, Recalled

TOKENS = 14  # past every window, from the shortest prompt on
LENGTHS = (3, 17, 1, 30, 17, 9)
LAYOUTS = {
    "one": {},
    "tp2": {"layout.llm.tp": 2},
    "pp2": {"layout.llm.pp": 2},
    "cp2": {"layout.llm.cp": 2},
    "ep2": {"layout.llm.ep": 2},
    "tp2 dp2": {"layout.llm.tp": 2},
    "shared": {"layout.domain": 2, "llm_sp.policy": "dynamic"},
}
RANKS = {"one": 1, "tp2 dp2": 4}
CASES = [
    ("llama", "one"),
    ("llama", "tp2"),
    ("qwen3", "pp2"),
    ("qwen3", "cp2"),
    ("qwen3_moe", "ep2"),
    ("qwen3_moe", "tp2 dp2"),
    ("llama", "shared"),
    ("gpt_oss", "tp2"),
    ("gemma3_text", "pp2"),
    ("qwen3_5_text", "one"),
    ("qwen3_5_text", "tp2"),
    ("qwen3_next", "cp2"),
]


def prompt_ids() -> list[list[int]]:
    """Prompts of unequal lengths, without the id that transformers is told to take for padding."""
    draw = np.random.default_rng(0)
    return [draw.integers(1, 256, length).tolist() for length in LENGTHS]


def generated(rank: int, config: Config, world: int) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """What a rank's run generates after the prompts with and without what passes keep, and the tokens of the
    passes of the former.
    """
    folder = RunFolder.create(Path(config.run.dir))
    trainer = Trainer(prepare_run(config, world), folder, rank, torch.device("cpu"))
    trainer.saving.restore()
    frame = Frame(bos=False, end_of_item=False, eos=False)
    prompts = [
        Prompt(SampleMeta(n, "prompts", len(ids), (), 0, frame=frame), np.array(ids, np.int64))
        for n, ids in enumerate(prompt_ids())
    ]
    generator = FreeGeneration(ForwardPasses(trainer.spec, trainer.rank, {}), trainer.control)
    sizes: list[int] = []
    stage = trainer.rank.stage
    assert stage is not None
    inner = stage.forward

    def noting(part, inputs, hidden, entering):  # type: ignore[no-untyped-def]
        sizes.append(inputs.packed.tokens)
        return inner(part, inputs, hidden, entering)

    stage.forward = noting  # type: ignore[method-assign]
    fast = generator.generate(0, prompts, TOKENS, frozenset())
    passed = list(sizes)
    slow = generator.generate(0, prompts, TOKENS, frozenset(), cached=False)
    trainer.close()
    return [list(fast[n]) for n in sorted(fast)], [list(slow[n]) for n in sorted(slow)], passed


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts"
    with DatasetWriter(path, ByteTokenizer()) as writer:
        writer.add(Sample("one", "a text"))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """The folder of a family and what transformers generates, made when first asked for."""
    made: dict[str, tuple[Path, list[list[int]]]] = {}

    def model(family: str) -> tuple[Path, list[list[int]]]:
        if family not in made:
            folder = tmp_path_factory.mktemp("model") / family
            module = make(family, folder, tie_word_embeddings=False, initializer_range=0.4)
            more = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            out = [module.generate(torch.tensor([ids]), **more)[0, len(ids) :] for ids in prompt_ids()]
            made[family] = folder, [of.tolist() for of in out]
        return made[family]

    return model


@pytest.mark.parametrize(("family", "layout"), CASES, ids=lambda of: of)
def test_tokens_are_those_of_transformers(
    ranks: RankPool, models, data: Path, tmp_path: Path, family: str, layout: str
) -> None:
    folder, expected = models(family)
    assert sum(len(set(tokens)) for tokens in expected) > 40, "texts that repeat a token tell little"
    config = compose_config(
        [
            "~experiment",
            "system=multiplexed",
            f"start.weights='{folder}'",
            f"+data.sources.texts.path={data}",
            "data.microbatch_tokens=64",
            "data.step_samples=1",
            "train.steps=1",
            "train.precision=fp32",
            "train.timeout_s=60",
            "optim.lr=1e-3",
            "tracking=jsonl",
            f"run.dir={tmp_path}",
        ]
    )
    world = RANKS.get(layout, 2)
    for fast, slow, passed in ranks.run(world, generated, with_values(config, LAYOUTS[layout]), world):
        assert slow == expected
        assert fast == expected
        assert len(passed) >= TOKENS
        assert max(passed[-8:]) <= len(LENGTHS) + 1, "later passes are over one token a sequence"


def test_a_memory_joins_by_sequence_and_forgets() -> None:
    memory, layer = Memory(), "a layer"
    values = torch.arange(12.0).reshape(12, 1)
    first = Recalled(memory, (7, 3), (2, 3), 1).extend(layer, values[:6], -values[:6])
    assert [of.flatten().tolist() for of in first] == [[0, 1, 2, 3, 4, 5], [0, -1, -2, -3, -4, -5]]
    (second,) = Recalled(memory, (3, 7), (1, 1), 2).extend(layer, values[6:10])
    assert second.flatten().tolist() == [2, 3, 4, 6, 0, 1, 7, 8, 9], "the tail is kept of nobody"
    memory.forget([7])
    assert list(memory.states[layer]) == [3]
