"""A step that some rank could not hold is refused before it runs, by the launcher or by that rank itself."""

from dataclasses import replace
from pathlib import Path

import pytest
from runs import TINY, checkpoints, data_keys, read_lines, strip, train, write

from omni.compose import compose_config
from omni.config import ConfigError
from omni.planning.fullest import check_first_steps, fullest_rank
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from pipeline.plan import StepPlan

STEPS = 12
Steps = list[tuple[int, list[StepPlan], int]]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("data") / "strips"
    own = data_keys(write(path, [strip(i) for i in range(32)]))
    uneven = "balance=lpt"  # under which a late step holds most
    return [*own, "launch.ranks=2", f"train.steps={STEPS}", "train.checkpoint_every=1", uneven]


@pytest.fixture(scope="module")
def spec(keys: list[str]) -> RunSpec:
    given = {key.partition("=")[0] for key in keys}
    return prepare_run(
        compose_config([*(key for key in TINY if key.partition("=")[0] not in given), *keys]), 2
    )


def on(spec: RunSpec, memory_bytes: int | None) -> RunSpec:
    return replace(spec, cluster=replace(spec.cluster, memory_bytes=memory_bytes))


@pytest.fixture(scope="module")
def steps(spec: RunSpec) -> Steps:
    """Of each step: its cursor, the plans of both domains and the most bytes that a rank holds."""
    cursor, found = 0, []
    for step in range(1, STEPS + 1):
        plans = list(spec.planner.all_domains(step, cursor))
        found.append((cursor, plans, fullest_rank(spec, plans).bytes))
        cursor = plans[0].taken.next_cursor
    return found


@pytest.fixture(scope="module")
def late(steps: Steps) -> tuple[int, int]:
    """A step beyond the third that holds more than any before it, and the most bytes of those."""
    held = [most for _, _, most in steps]
    number = next(n for n in range(3, STEPS) if held[n] > max(held[:n]))
    return number + 1, max(held[:number])


def test_the_first_two_steps_of_all_domains_must_fit(spec: RunSpec, steps: Steps) -> None:
    for first in (1, 3, 10):
        (cursor, _, one), (_, _, two) = steps[first - 1], steps[first]
        check_first_steps(on(spec, None), first, cursor)
        check_first_steps(on(spec, max(one, two)), first, cursor)
        with pytest.raises(ConfigError, match=rf"of step ({first}|{first + 1}), more than"):
            check_first_steps(on(spec, max(one, two) - 1), first, cursor)
    check_first_steps(on(spec, steps[-1][2]), STEPS, steps[-1][0])


def test_a_run_that_cannot_begin_starts_no_rank_and_writes_nothing(
    keys: list[str], steps: Steps, tmp_path: Path
) -> None:
    result = train([*keys, f"cluster.memory_bytes={steps[0][2] - 1}"], tmp_path)
    assert result.code == 2
    assert result.lines_with("error: rank ", "of step 1", "cluster.memory_bytes"), result.err
    assert "exit code" not in result.err, "the launcher says this when ranks end"
    assert not (tmp_path / "run").exists()


def test_a_late_step_that_does_not_fit_ends_all_ranks_and_keeps_the_checkpoint(
    keys: list[str], late: tuple[int, int], tmp_path: Path
) -> None:
    step, most = late
    result = train([*keys, f"cluster.memory_bytes={most}"], tmp_path)
    assert result.code in (1, 2), "1 if another rank was told of its lost peer first"
    assert result.lines_with("rank ", "error: ", f"of step {step}", f"cluster.memory_bytes={most}"), (
        result.err
    )
    assert all(record["progress/step"] < step for record in read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert checkpoints(tmp_path / "run")
    again = train([*keys, f"train.steps={step}", "cluster.memory_bytes=null"], tmp_path)
    assert again.code == 0, again.err
    done = [record["progress/step"] for record in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert done == list(range(1, step + 1))
