"""Values that ranks gather: what comes back is what was given, and nothing in it runs."""

import pickle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

from parallel.plain import collect_plain, gather_plain


def _own(rank: int) -> Any:
    many = torch.arange(1000 * rank, dtype=torch.float32)
    return {"rank": rank, "of": [(1, 2.5, None), "text" * rank], (1, "key"): many, "bf16": many.bfloat16()}


def _same(found: list[Any], world: int) -> bool:
    return len(found) == world and all(
        of.keys() == own.keys()
        and (of["rank"], of["of"]) == (own["rank"], own["of"])
        and all(torch.equal(of[key], own[key]) for key in ((1, "key"), "bf16"))
        for of, own in zip(found, map(_own, range(world)), strict=True)
    )


def _gathers(rank: int, world: int) -> bool:
    group = dist.group.WORLD
    found = collect_plain(_own(rank), group)
    return _same(gather_plain(_own(rank)), world) and (rank > 0) == (found is None)


def test_every_value_comes_back_by_rank(ranks: RankPool) -> None:
    assert ranks.run(3, _gathers, 3) == [True] * 3


class Harm:
    """A pickle that leaves a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _harms(rank: int, path: Path, by: str) -> str:
    """What comes of gathering where all ranks are strangers."""
    with patch("parallel.plain.torch.save", lambda value, out: out.write(pickle.dumps(Harm(path)))):
        try:
            collect_plain(0, dist.group.WORLD) if by == "collect" else gather_plain(0)
        except pickle.UnpicklingError as error:
            return type(error).__name__
    return "read"


@pytest.mark.parametrize("by", ["collect", "gather"])
def test_nothing_that_comes_runs(ranks: RankPool, tmp_path: Path, by: str) -> None:
    found = ranks.run(2, _harms, tmp_path / "harm", by)
    assert found == (["UnpicklingError"] * 2 if by == "gather" else ["UnpicklingError", "read"])
    assert not (tmp_path / "harm").exists()
