"""Clusters as configurations: what their files give in each precision, and what is refused."""

from pathlib import Path

import pytest

import hydra_conf
from omni.__main__ import main
from omni.compose import compose_config, load_config
from omni.config import ConfigError
from omni.planning.clusters import cluster_of

FILES = sorted(file.stem for file in (Path(hydra_conf.__file__).parent / "cluster").glob("*.yaml"))
KEYS = (
    "~experiment",
    "system=multiplexed",
    "+model/llm=llama3_1b",
    "launch.ranks=8",
    "data.microbatch_tokens=4096",
)
STEP = (*KEYS, "data.step_samples=8", "optim.lr=1e-4", "train.steps=1", "cluster.memory_bytes=null")


def cluster(name: str, *keys: str, precision: str = "bf16"):
    return cluster_of(compose_config([*STEP, f"cluster={name}", *keys]).cluster, precision)


@pytest.mark.parametrize("name", FILES)
def test_a_file_states_every_rate_that_its_precisions_need(name: str) -> None:
    config = compose_config([*STEP, f"cluster={name}"]).cluster
    assert config.name == name
    assert config.flops.keys() == config.efficiency.products.keys()
    for precision in config.flops:
        of = cluster_of(config, precision)
        assert 0 < of.products <= of.flops
        assert 0 < of.attention_backward <= of.attention <= of.flops * 2
        assert of.links.inside.bytes_per_s >= of.links.across.bytes_per_s
    assert config.queues == ("per_communicator" if config.device == "cpu" else "one")


def test_low_precision_is_of_products_alone() -> None:
    plain, low = cluster("h100"), cluster("h100", precision="fp8")
    assert low.products > 1.5 * plain.products
    assert low.plain_products == plain.products
    assert (low.attention, low.moved_per_s) == (plain.attention, plain.moved_per_s)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            ["cluster=a100", "train.precision=fp8"],
            ["cluster.flops of a100 has no fp8", "fp32, bf16", "choose"],
        ),
        (["cluster=h100", "train.precision=nvfp4"], ["has no nvfp4", "fp32, bf16, fp8"]),
        (["cluster.queues=two"], ["cluster.queues=two", "one, per_communicator"]),
        (["cluster.device=gpu"], ["cluster.device=gpu", "cpu, cuda"]),
        (["cluster.ranks_per_rail=12"], ["cluster.ranks_per_rail=12", "ranks_per_node=8"]),
        (["cluster.efficiency.products.bf16=0"], ["cluster.efficiency.products.bf16=0", "at least 1e-06"]),
        (
            ["cluster.efficiency.products.bf16=1.01"],
            ["cluster.efficiency.products.bf16=1.01", "is a share: at most 1"],
        ),
        (["cluster.efficiency.memory=65"], ["cluster.efficiency.memory=65", "is a share: at most 1"]),
        (["cluster.price_per_hour=-1"], ["cluster.price_per_hour=-1", "at least 0"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) and "=" in value[-1] else "",
)
def test_what_no_cluster_has_is_refused(
    keys: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = keys if keys[0].startswith("cluster=") else ["cluster=h100", *keys]
    assert main(["plan", "--trace", "4096", *STEP, *given]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


def test_a_price_is_said_of_what_a_user_states(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--trace", "4096", *STEP, "cluster=h100"]) == 0
    assert "price" not in capsys.readouterr().out
    assert main(["plan", "--trace", "4096", *STEP, "cluster=h100", "cluster.price_per_hour=2"]) == 0
    assert "price of a step" in capsys.readouterr().out


def test_the_figures_of_an_earlier_version_are_those_of_today() -> None:
    saved = Path(__file__).parents[1] / "written" / "45bb3b3" / "run" / "config.yaml"
    found = cluster_of(load_config(saved).cluster, "fp32")
    assert (found.flops, found.products, found.attention) == (80 * 10**9, 48 * 10**9, 48 * 10**9)
    assert found.queues == "per_communicator"


# Other frameworks.


def step_ms(capsys: pytest.CaptureFixture[str], *more: str) -> float:
    keys = ["cluster=h100", "layout.llm.tp=4", "data.step_samples=16"]
    assert main(["plan", "--trace", "4096", *STEP, *keys, *more]) == 0
    out, err = capsys.readouterr()
    assert ("not of our ranks" in err) == ("--framework" in more)
    line = next(line for line in out.splitlines() if line.startswith("  step  "))
    return float(line.split()[1].replace(",", ""))


def test_a_framework_that_overlaps_takes_less(capsys: pytest.CaptureFixture[str]) -> None:
    ours = step_ms(capsys)
    assert step_ms(capsys, "--framework", "megatron") < 0.95 * ours
    assert step_ms(capsys, "--framework", "megatron_2023") < ours


def test_a_framework_that_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--trace", "4096", *STEP, "cluster=h100", "--framework", "mine"]) == 2
    assert "--framework mine: there are megatron" in capsys.readouterr().err


def test_no_key_hides_what_ours_does_not() -> None:
    with pytest.raises(ConfigError, match="framework"):
        compose_config([*STEP, "+framework=megatron"])
