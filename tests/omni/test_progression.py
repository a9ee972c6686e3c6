"""When a run must not go on."""

from pathlib import Path

import pytest

from omni.training.progression import BadDataError, Progression


@pytest.mark.parametrize(
    ("cursor", "bad", "share"), [(20, 10, 0.01), (1_000, 10, 0.01), (5_000, 50, 0.01), (9, 0, 0.0)]
)
def test_a_few_bad_samples_do_not_end_a_run(cursor: int, bad: int, share: float) -> None:
    Progression(Path("metrics.jsonl"), cursor=cursor, bad_samples=bad).check_data(share)


@pytest.mark.parametrize(
    ("cursor", "bad", "share"), [(20, 11, 0.01), (1_000, 11, 0.01), (5_000, 51, 0.01), (9, 1, 0.0)]
)
def test_a_share_of_bad_samples_does(cursor: int, bad: int, share: float) -> None:
    with pytest.raises(BadDataError, match=rf"{bad} of {cursor} samples.*data.max_error_share={share}"):
        Progression(Path("metrics.jsonl"), cursor=cursor, bad_samples=bad).check_data(share)
