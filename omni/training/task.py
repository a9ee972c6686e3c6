"""What ranks are to do with a checkpoint, and what came of it: two files in their folder. No torch here."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Self

from dataloader.prompts import metas_of
from dataloader.tokens import SampleMeta
from infra.run_folder import RunFolder, read_summary, write_json

_TASK, _RESULT = "task.json", "result.json"


@dataclass(frozen=True)
class Task:
    """Go on with `prompts`, by their ids, with at most `most_tokens` tokens each, up to one of `ends`;
    evaluate on held-out data where there are none.
    """

    prompts: tuple[tuple[int, ...], ...] = ()
    most_tokens: int = 0
    ends: tuple[int, ...] = ()

    @property
    def trace(self) -> list[SampleMeta]:
        """The samples that take the place of datasets, none for an evaluation."""
        return metas_of(self.prompts)

    def write(self, folder: RunFolder) -> None:
        """Leave it for the ranks of a folder."""
        write_json(folder.path / _TASK, asdict(self))

    @classmethod
    def read(cls, folder: RunFolder) -> Self:
        """Read what `write` left."""
        said = json.loads((folder.path / _TASK).read_text())
        return cls(tuple(map(tuple, said["prompts"])), said["most_tokens"], tuple(said["ends"]))


def write_result(folder: RunFolder, result: dict[str, Any]) -> None:
    """Leave what came of a task for who started the ranks."""
    write_json(folder.path / _RESULT, result)


def read_result(folder: RunFolder) -> dict[str, Any] | None:
    """Read what `write_result` left, None if ranks came to no result."""
    path = folder.path / _RESULT
    return read_summary(path) if path.exists() else None
