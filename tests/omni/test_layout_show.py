"""`omni layout show`: every group that a rank is in, axes of every component, and layouts that cannot be."""

import time
from argparse import Namespace

import pytest

from omni.commands.layout import SHOWN_RANKS, run

MOE = "model.llm.moe={experts: 8, topk: 2, ffn: 88, dense_layers: 1}"
FIVE = [
    "launch.ranks=16",
    "layout.llm.tp=2",
    "layout.llm.cp=2",
    "layout.llm.pp=2",
    "layout.llm.ep=4",
    "+layout.encoders.image.tp=2",
    "cluster.ranks_per_node=8",
    MOE,
]


@pytest.fixture
def show(capsys: pytest.CaptureFixture):
    def shown(*keys: str, rank: int = 0, axis: str = "pp") -> tuple[int, str, str]:
        code = run(Namespace(overrides=list(keys), config_dir=None, rank=rank, axis=axis))
        out = capsys.readouterr()
        return code, out.out, out.err

    return shown


def groups(out: str) -> dict[tuple[str, str], list[int]]:
    """Ranks by component and axes."""
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("component "))
    rows = lines[first + 1 : lines.index("", first)]
    names = [(row[:10].strip(), row[11:23].strip()) for row in rows]
    assert len(set(names)) == len(names)
    ranks = [row[24:60].partition("…")[0].split() for row in rows]
    return {name: [int(r) for r in of] for name, of in zip(names, ranks, strict=True)}


def test_every_group_of_a_rank_is_explained(show):
    code, out, _ = show(*FIVE, rank=5)
    assert code == 0
    everyone = list(range(SHOWN_RANKS))
    assert groups(out) == {
        ("llm", "tp"): [4, 5],
        ("llm", "cp·replica"): [5, 7],
        ("llm", "pp"): [5, 13],
        ("llm", "ends of pp"): [5, 13],
        ("llm", "cp·dp"): [1, 3, 5, 7],
        ("experts", "ep"): [4, 5, 6, 7],
        ("experts", "edp"): [1, 5],
        ("experts", "tp·cp·dp"): [0, 1, 2, 3, 4, 5, 6, 7],
        ("image", "tp"): [4, 5],
        ("image", "dp"): [1, 3, 5, 7, 9, 11, 13, 15],
        ("boundary", "domain"): [4, 5, 6, 7, 12, 13, 14, 15],
        ("control", "tree"): [0, 5],
        ("totals", "world"): everyone,
    }
    assert "… (16)" in out


def test_what_a_group_carries_depends_on_the_model_and_the_policies(show):
    plain = groups(show("launch.ranks=4", "layout.domain=2")[1])
    assert ("llm", "cp·replica") not in plain
    assert ("image", "slot") not in plain
    shared = groups(show("launch.ranks=4", "layout.domain=2", "llm_sp=dynamic", "encoder_sp=all")[1])
    assert shared[("llm", "cp·replica")] == shared[("image", "slot")] == [0, 1]
    # Experts whole on every rank are reduced over the whole stage.
    whole = groups(show("launch.ranks=4", "layout=tp2", MOE)[1])
    assert ("experts", "ep") not in whole
    assert whole[("experts", "edp")] == [0, 1, 2, 3]
    assert whole[("llm", "cp·dp")] == [0, 2]
    # A stage of dense layers alone holds none.
    last = ["launch.ranks=4", "layout=pp2", MOE.replace("dense_layers: 1", "dense_layers: 3")]
    assert not [name for name in groups(show(*last, rank=0)[1]) if name[0] == "experts"]
    assert [name for name in groups(show(*last, rank=3)[1]) if name[0] == "experts"]
    # Only the ends of a pipeline hold a tied embedding.
    deep = ["launch.ranks=4", "layout.llm.pp=4"]
    held = [("llm", "ends of pp") in groups(show(*deep, rank=rank)[1]) for rank in range(4)]
    assert held == [True, False, False, True]
    assert ("llm", "ends of pp") not in groups(show(*deep, "model.llm.tied=false")[1])
    assert groups(show("launch.ranks=1")[1]) == {}
    beside = ["launch.ranks=3", "placement=disaggregated", "placement.ranks=1"]
    assert {name for name, _ in groups(show(*beside, rank=2)[1])} == {
        "boundary",
        "control",
        "totals",
    }


def test_axes_of_encoders_are_drawn(show):
    keys = ["launch.ranks=6", "layout=tp2", "placement=disaggregated", "placement.ranks=4"]
    for axis, drawn in (
        ("tp", "0 1 . . . ."),
        ("image.tp", ". . 0 1 0 1"),
        ("image.dp", ". . 0 0 1 1"),
        ("image.slot", ". . 0 0 1 1"),
    ):
        code, out, _ = show(*keys, "+layout.encoders.image.tp=2", axis=axis)
        assert code == 0
        assert out.splitlines()[-1].split()[1:] == drawn.split()
        assert f"holds no part of {'image' if '.' in axis else 'the LLM'}" in out
    code, _, err = show(*keys, axis="sound.tp")
    assert code == 2
    assert "--axis sound.tp: choose one of tp, cp" in err
    assert "image.tp" in err


@pytest.mark.parametrize(
    "keys, words",
    [
        (["launch.ranks=3", "layout.llm.tp=3"], "layout.llm.tp=3 does not divide model.llm.heads=4"),
        (["launch.ranks=8", "layout.llm.pp=8"], "layout.llm.pp=8"),
        (["launch.ranks=2", "layout.llm.ep=2"], "layout.llm.ep=2, but the model has no experts"),
        (["launch.ranks=8", "+layout.encoders.image.tp=8"], "does not divide model.encoders.image.heads=4"),
        (["model.llm.heads=0"], "model.llm.heads=0"),
        (["data.tokenizer=gpt"], "data.tokenizer=gpt"),
    ],
)
def test_a_layout_that_the_model_does_not_allow_is_refused(show, keys, words):
    code, out, err = show(*keys)
    assert (code, out) == (2, "")
    assert words in err


def test_sixteen_thousand_ranks_are_shown_at_once(show):
    start = time.process_time()
    code, out, _ = show("experiment=llama3_70b", "launch.ranks=16384", rank=12345, axis="image.dp")
    assert code == 0
    assert time.process_time() - start < 10
    assert "… (16384)" in out
