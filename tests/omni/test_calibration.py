"""`omni calibrate`: its figures, its file, and what it refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import RankPool
from small import overrides, write_mixed

from omni.__main__ import main
from omni.calibration import links, machine, worker
from omni.calibration.figures import Measured, cluster_file, link_of
from omni.compose import compose_config
from omni.planning.clusters import cluster_of
from parallel.cluster import Cluster, Link

CPU = torch.device("cpu")


def times(link: Link) -> tuple[tuple[int, int], ...]:
    return tuple((size, link.message_ns(size)) for size in (2**6, 2**16, 2**24))


NEAR, FAR = Link(2_000, 10**10), Link(30_000, 10**9)
FAST = Measured(
    {128: 5 * 10**9, 1024: 8 * 10**10},
    {256: (10**9, 2 * 10**9)},
    4 * 10**10,
    10**10,
    None,
    10**6,
    4_000,
    90_000,
    20_000,
    {"all_gather": times(NEAR), "message": times(NEAR)},
    {},
)
SLOW = Measured(
    {128: 4 * 10**9, 1024: 5 * 10**10},
    {256: (10**9, 2 * 10**9)},
    3 * 10**10,
    9 * 10**9,
    None,
    2 * 10**6,
    5_000,
    80_000,
    0,
    {},
    {},
)


def read(folder: Path, text: str) -> Cluster:
    """The cluster that a file gives to whoever chooses it."""
    (folder / "cluster").mkdir()
    (folder / "cluster" / "mine.yaml").write_text(text)
    config = compose_config(["cluster=mine"], str(folder))
    return cluster_of(config.cluster, "fp32")


@pytest.mark.parametrize("link", [NEAR, FAR])
def test_a_link_is_found_from_the_times_of_messages(link: Link) -> None:
    found = link_of(times(link))
    assert found.latency_ns == pytest.approx(link.latency_ns, rel=0.05)
    assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=0.01)


def test_what_disturbs_a_small_message_makes_no_link_fast(tmp_path: Path) -> None:
    """On a busy machine a small message may take longer than a large one: no bandwidth is made of that."""
    disturbed = ((2**10, 1_645_000), (2**14, 300_000), (2**20, 500_000))
    assert link_of(disturbed) == Link(300_000, 2**20 * 10**9 // 250_000)
    assert link_of(disturbed[::2]).bytes_per_s == 2**20 * 10**9 // 250_000
    assert link_of(disturbed).message_ns(2**20) >= 500_000, "never less than what was seen"
    busy = Measured(**{**vars(FAST), "inside": {"message": disturbed, "all_gather": times(NEAR)}})
    text = cluster_file("mine", "cpu", "fp32", [busy, FAST], 2, "Two ranks.")
    message, gather = (
        next(line for line in text.splitlines() if kind in line) for kind in ("message", "all_g")
    )
    assert "unsure: bytes not told from latency; measure again" in message
    assert "unsure" not in gather
    read(tmp_path, text)


def test_a_file_has_the_figures_of_the_slowest_rank(tmp_path: Path) -> None:
    cluster = read(tmp_path, cluster_file("mine", "cpu", "fp32", [FAST, SLOW], 2, "Two ranks."))
    assert (cluster.name, cluster.ranks_per_node, cluster.memory_bytes) == ("mine", 2, None)
    assert (cluster.flops, cluster.moved_per_s, cluster.op_overhead_ns) == (
        5 * 10**10,
        9 * 10**9,
        2 * 10**6,
    )
    assert (cluster.launch_ns, cluster.dispatch_ns) == (5_000, 90_000)
    assert (cluster.issue_ns, cluster.queues) == (20_000, "per_communicator")
    assert cluster.products == pytest.approx(3 * 10**10, rel=1e-3)
    assert (cluster.attention, cluster.attention_backward) == pytest.approx((10**9, 2 * 10**9), rel=1e-3)
    assert cluster.links.inside.latency_ns == pytest.approx(NEAR.latency_ns, rel=0.05)
    assert cluster.links.inside == cluster.links.across, "nobody is on another node"


def test_links_that_nobody_could_measure_are_noted(tmp_path: Path) -> None:
    text = cluster_file("mine", "cpu", "fp32", [SLOW], 1, "One rank.")
    assert "# links inside a node: not measured" in text
    assert read(tmp_path, text).links.inside == Link(2 * 10**6, 9 * 10**9)


def test_links_between_nodes_are_told_from_those_inside(tmp_path: Path) -> None:
    across = Measured(**{**vars(FAST), "across": {"all_reduce": times(FAR)}})
    cluster = read(tmp_path, cluster_file("mine", "cpu", "fp32", [across, FAST], 1, "Two nodes."))
    assert cluster.links.across.bytes_per_s == pytest.approx(FAR.bytes_per_s, rel=0.01)
    assert cluster.links.inside.bytes_per_s == pytest.approx(NEAR.bytes_per_s, rel=0.01)


def test_what_starting_a_pass_costs_is_told_from_what_its_layers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {}

    def took(function: Callable[[], object], device: torch.device) -> int:
        seen: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(machine._Layer, "__call__", lambda self, x: seen.append(1) or x)
            function()
        layers[len(seen)] = 700 + 30 * len(seen)
        return layers[len(seen)]

    monkeypatch.setattr(machine, "timed", took)
    assert machine.starting_ns(CPU, torch.float32) == (700, 30)
    assert len(layers) == 2


def test_a_busy_machine_makes_no_start_negative() -> None:
    assert machine.parted(4_000, 3_000) == (4_000, 0), "many layers seemed faster than few"
    assert machine.parted(400, 400_000) == (0, 100), "a layer takes no more than the few"


def _calibrate(rank: int, out: Path, ranks_per_node: int) -> None:
    links.SIZES, machine._ENOUGH_S = (2**8, 2**18), 0.0  # type: ignore[misc]
    worker.calibrate(out, "fp32", CPU, ranks_per_node)


@pytest.mark.parametrize(
    ("per_node", "where", "other"),
    [(2, "inside a node", "between nodes"), (1, "between nodes", "inside a node")],
)
def test_two_ranks_measure_what_a_plan_is_made_with(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], per_node: int, where: str, other: str
) -> None:
    out = tmp_path / "cluster" / "mine.yaml"
    out.parent.mkdir()
    ranks.run(2, _calibrate, out, per_node)
    text = out.read_text()
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "message"):
        assert f"# {kind} {where}: " in text
    assert f"# links {other}: not measured" in text
    config = compose_config(["cluster=mine"], str(tmp_path))
    assert config.cluster.ranks_per_node == per_node
    assert 10**8 < config.cluster.flops["fp32"] < 10**14
    assert 10**3 < config.cluster.issue_ns < 10**7 if per_node == 2 else config.cluster.issue_ns == 0
    assert config.cluster.launch_ns >= 0
    assert config.cluster.dispatch_ns > 0
    shares = config.cluster.efficiency
    assert all(0 < of <= 1 for of in (shares.products["fp32"], shares.attention, shares.attention_backward))
    assert 10**7 < config.cluster.link_bytes_per_s < 10**13
    write_mixed(tmp_path / "mixed")
    line = overrides(tmp_path / "mixed", tmp_path / "run", "cluster=mine", "launch.ranks=2")
    assert main(["plan", "--config-dir", str(tmp_path), *line]) == 0
    assert "simulated on mine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "mine.yaml"], "FOLDER/cluster/NAME.yaml"),
        (["--out", "cluster/mine.json"], "FOLDER/cluster/NAME.yaml"),
        (
            ["--out", "cluster/mine.yaml", "--precision", "fp8"],
            "--precision fp8: choose one of auto, fp32, bf16",
        ),
        (["--out", "cluster/mine.yaml", "--ranks", "0"], "--ranks 0: "),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
