"""Who is slower than its peers: by planted op times, and on real ranks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from ranks import RankPool
from small import overrides, write_mixed
from test_trainer import make_trainer
from work_costs import work_cost

from infra.run_folder import RunFolder, read_metrics
from omni.compose import compose_config
from omni.config import Config, HealthConfig
from omni.training.health import Health
from omni.training.slowness import Slowest, SlowRanks, Spent, ratio_to_peers
from parallel.cluster import Link, Links
from parallel.control_of_run import connected
from parallel.costs import CostTable
from parallel.learning import Sample


def test_a_rank_is_measured_by_its_peers_and_not_by_the_table() -> None:
    """The table says half of what the LLM takes and three times what the encoder does."""
    fast = {"llm/0": Spent(2000, 1000), "image": Spent(100, 300)}
    slow = {"llm/0": Spent(4000, 1000), "image": Spent(400, 600)}
    everyone = {"llm/0": Spent(8000, 3000), "image": Spent(600, 1200)}  # of two fast ranks and the slow one
    assert ratio_to_peers(slow, everyone) == pytest.approx(2, rel=0.01)
    assert ratio_to_peers(fast, everyone) < 0.8


def test_stages_without_copies_are_peers_of_each_other() -> None:
    own, other = {"llm/1": Spent(3000, 1000)}, {"llm/0": Spent(1000, 1000), "image": Spent(50, 50)}
    everyone = {"llm/0": Spent(1000, 1000), "llm/1": Spent(3000, 1000), "image": Spent(50, 50)}
    assert ratio_to_peers(own, everyone) == pytest.approx(3)
    assert ratio_to_peers({"image": Spent(50, 50)}, everyone) == 0, "nobody else encodes"
    assert ratio_to_peers(other, everyone) == pytest.approx(1 / 3)


def test_a_slow_rank_that_cannot_be_noted_trains_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own: Any = SimpleNamespace(
        slow_ranks=SimpleNamespace(hear=lambda _: Slowest(0, 2.0, 2)),
        rank=SimpleNamespace(rank=0),
        config=HealthConfig(exclude_slow=True),
        folder=RunFolder(tmp_path / "gone"),
    )
    assert Health.hear(own, 7, {}) == Slowest(0, 2.0, 2)
    assert "is not noted for the next restart: [Errno 2]" in capsys.readouterr().err


TABLE = CostTable(0, {"llm/0": work_cost(10**8, 10**5, 10**5)}, Links(Link(1, 1), Link(1, 1)), row_bytes=4)
NAMED_WITHIN = 20


def _watch(rank: int, slow: int, since: int, factor: int) -> dict[int, tuple[Slowest, bool]]:
    """Steps in which the passes of one rank take longer from one of them on; what is found, by step."""
    world = dist.get_world_size()
    watch, control, found = SlowRanks(TABLE.parts, rank, world), connected(rank, world, 60), {}
    for step in range(1, since + NAMED_WITHIN + 1):
        tokens = 50 * (1 + (step + rank) % 3)
        ns = TABLE.parts["llm/0"].compute_ns(tokens, tokens, None) * (7 + (step + rank) % 2)
        if (rank, step >= since) == (slow, True):
            ns *= factor
        # Heard after the next step has been done, and before that is told.
        slowest = watch.hear(control.settle("step", step - 1)) if step > 1 else None
        control.offer("step", step, watch.tell([Sample("llm/0", None, tokens, tokens, ns)], TABLE))
        if slowest is not None:
            found[step] = (slowest, slowest.is_slow)
    return found


@pytest.mark.parametrize("since", [1, 7, 8, 9, 10, 11])
def test_a_rank_slowed_twofold_is_named_once_within_20_steps(ranks: RankPool, since: int) -> None:
    answers = ranks.run(3, _watch, 1, since, 2)
    assert answers == [answers[0]] * 3
    named = [step for step, (slowest, is_slow) in answers[0].items() if is_slow]
    assert len(named) == 1
    assert since < named[0] <= since + NAMED_WITHIN - 1
    slowest, _ = answers[0][named[0]]
    assert slowest.rank == 1
    assert slowest.ratio == pytest.approx(2, rel=0.15)
    assert "rank 1 took 2.0 times as long" in str(slowest).replace("1.9", "2.0").replace("2.1", "2.0")


def test_ranks_of_one_speed_are_not_called_slow(ranks: RankPool) -> None:
    found = ranks.run(3, _watch, 1, 11, 1)[0]
    assert found
    assert not any(is_slow for _, is_slow in found.values())
    assert max(slowest.ratio for slowest, _ in found.values()) < 1.3


def _train(rank: int, config: Config) -> None:
    """Train; the clock shows ops of rank 1 to take three times as long."""
    trainer = make_trainer(rank, config, 2)
    run = trainer.rank.engine.run

    def slowed(plan: Any, inputs: Any, watch: Any = None) -> Any:
        result = run(plan, inputs, watch)
        result.timings = [
            t._replace(start_s=0.0, end_s=0.003 if rank else 0.001)  # on a busy machine, real times vary more
            for t in result.timings
        ]
        return result

    trainer.rank.engine.run = slowed  # type: ignore[method-assign]
    trainer.run()


def test_a_run_shows_and_records_its_slowest_rank(ranks: RankPool, tmp_path: Path) -> None:
    write_mixed(tmp_path / "mixed")
    ranks.run(2, _train, compose_config(overrides(tmp_path / "mixed", tmp_path / "run", "train.steps=9")))
    records = [m for m in read_metrics(tmp_path / "run" / "metrics.jsonl") if "health/slowest" in m]
    assert [m["progress/step"] for m in records] == [7]
    assert {m["health/slowest_rank"] for m in records} == {1}
    assert all(1.5 < m["health/slowest"] < 6 for m in records)
