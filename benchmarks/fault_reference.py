"""What a run that a fault was done to is compared with: the run that nobody disturbed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.run_folder import RunFolder, read_metrics

LEARNT = ("loss/", "optim/", "progress/", "data/skipped/")  # what no interruption may change


class MissError(AssertionError):
    """What a kind of fault must come to, and did not; the message says what was found."""


def check(holds: object, text: str) -> None:
    """Raise MissError with a text unless something holds."""
    if not holds:
        raise MissError(text)


@dataclass(frozen=True)
class Reference:
    """The run that nobody disturbed: its folder, and those parts of its records that must come out again."""

    path: Path

    @property
    def learnt(self) -> list[dict[str, str]]:
        """What each step learnt."""
        return learnt(self.path)

    @property
    def samples(self) -> str:
        """Which samples each step took."""
        return RunFolder(self.path).samples.read_text()


def learnt(path: Path) -> list[dict[str, str]]:
    """Of each step in the records of a run folder what does not depend on when it was interrupted."""
    return [
        {key: repr(value) for key, value in record.items() if key.startswith(LEARNT)}
        for record in read_metrics(RunFolder(path).metrics)
    ]


def difference(ours: Mapping[str, object], theirs: Mapping[str, object]) -> str:
    """The first keys in which two records differ, with both values."""
    keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    return json.dumps({key: [ours.get(key), theirs.get(key)] for key in keys[:3]})
