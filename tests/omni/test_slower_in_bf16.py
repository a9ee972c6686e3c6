"""Gradients that travel in bf16 are timed beside fp32 before a run: where they take longer, both are told."""

import re
from pathlib import Path

import pytest
from small import overrides, write_mixed

from dataloader.tokens import SampleMeta
from infra.run_folder import RunFolder
from omni.__main__ import main
from omni.compose import compose_config
from omni.models.llm import NAME as LLM
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.planning.slower_in_bf16 import slower_in_bf16
from omni.planning.work import num_parameters
from omni.training.opening import opening

REDUCE = "train.mixed_precision_reduce=bf16"
FOUND = re.compile(r"those of (\w+) take ([\d,.]+) ms in bf16 and ([\d,.]+) ms in fp32")
WIDE = ("layout.llm.tp=8", "layout.encoders.image.tp=8")


def spec_of(*keys: str) -> RunSpec:
    """Llama 3 8B with an encoder on 64 H100s, by data parallelism alone unless `keys` say otherwise."""
    config = compose_config(
        [
            *("experiment=llama3_70b", "model=llama3_1b_so400m", "model/llm=llama3_8b", "launch.ranks=64"),
            *("layout.llm={tp: 1, cp: 1, pp: 1}", "layout.domain=8", "layout.encoders.image.tp=1"),
            *("train.precision=bf16", *keys),
        ]
    )
    return prepare_run(config, 64, trace=[SampleMeta(0, "none", 1, (), 0)])


def test_it_is_told_where_a_node_holds_several_replicas() -> None:
    """By the bytes that leave a rank of eight on a node: in bf16 to 56 of 63 others, over its own link; in
    fp32 along a ring, over the links of all eight.
    """
    spec = spec_of(REDUCE)
    (said,) = slower_in_bf16(spec)
    assert said.endswith("Set train.mixed_precision_reduce=fp32")
    counts = num_parameters(spec.config.model.llm, spec.encoders, spec.tokenizer.vocab_size)
    found = {name: (float(bf16), float(fp32)) for name, bf16, fp32 in FOUND.findall(said)}
    assert found.keys() == {LLM, "image"}
    own, inside = spec.cluster.links.across.bytes_per_s, spec.cluster.links.inside.bytes_per_s
    for name, (bf16, fp32) in found.items():
        assert bf16 == pytest.approx(counts[name] / 64 * 56 * 2 / own * 1e3, rel=0.03)
        assert fp32 == pytest.approx(counts[name] / 64 * 63 * 4 / min(inside, 8 * own) * 1e3, rel=0.03)


@pytest.mark.parametrize(
    "keys",
    [
        (),
        (REDUCE, *WIDE),
        (REDUCE, WIDE[0]),  # the encoder's would take longer, all together do not
    ],
)
def test_nothing_is_told_where_bf16_is_no_slower(keys: tuple[str, ...]) -> None:
    assert list(slower_in_bf16(spec_of(*keys))) == []


def test_what_does_not_learn_does_not_count() -> None:
    (said,) = slower_in_bf16(spec_of(REDUCE, WIDE[0], "+optim.components={llm: {frozen: true}}"))
    assert [name for name, _, _ in FOUND.findall(said)] == ["image"]


def test_a_run_and_a_plan_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mixed(tmp_path / "mixed")
    keys = overrides(tmp_path / "mixed", tmp_path / "run", "launch.ranks=16", "cluster=h100", REDUCE)
    spec = prepare_run(compose_config(keys), 16)
    (note,) = (f"note: {text}" for text in slower_in_bf16(spec))
    assert note in list(opening(spec, RunFolder.create(tmp_path / "run"), None, "nowhere"))
    assert main(["plan", *keys]) == 0
    assert note in capsys.readouterr().err.splitlines()
