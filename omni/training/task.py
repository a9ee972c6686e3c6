"""What ranks are to do with a checkpoint, and what came of it: two files in their folder. No torch here."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from dataloader.prompts import Asked, PromptItems
from dataloader.tokens import ItemMeta, SampleMeta
from infra.run_folder import RunFolder, read_summary, write_json

_TASK, _RESULT = "task.json", "result.json"


@dataclass(frozen=True)
class Task:
    """Go on with `prompts`, with at most `most_tokens` tokens each, up to one of `ends`; evaluate on held-out
    data where there are none.
    """

    prompts: tuple[Asked, ...] = ()
    most_tokens: int = 0
    ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, prompts: Sequence[Asked], most_tokens: int) -> Self:
        """Go on with prompts, up to what ends an answer to any of them."""
        ends = sorted(frozenset().union(*(each.ends for each in prompts)))
        return cls(tuple(prompts), most_tokens, tuple(ends))

    @property
    def trace(self) -> list[SampleMeta]:
        """The samples that take the place of datasets, none for an evaluation."""
        return [prompt.meta(number) for number, prompt in enumerate(self.prompts)]

    @property
    def items(self) -> PromptItems:
        """What reads the items of prompts."""
        return PromptItems(
            [
                [(item.modality, file) for item, file in zip(prompt.items, prompt.files, strict=True)]
                for prompt in self.prompts
            ]
        )

    def write(self, folder: RunFolder) -> None:
        """Leave it for the ranks of a folder."""
        bare = [replace(prompt, given={}, ends=frozenset()) for prompt in self.prompts]
        prompts = [asdict(prompt) | {"ends": []} for prompt in bare]
        said = {"prompts": prompts, "most_tokens": self.most_tokens, "ends": self.ends}
        write_json(folder.path / _TASK, said)

    @classmethod
    def read(cls, folder: RunFolder) -> Self:
        """Read what `write` left."""
        said = json.loads((folder.path / _TASK).read_text())
        return cls(tuple(map(_prompt, said["prompts"])), said["most_tokens"], tuple(said["ends"]))


def _prompt(said: dict[str, Any]) -> Asked:
    items = tuple(ItemMeta(**{**item, "size": tuple(item["size"])}) for item in said["items"])
    return Asked(said["name"], {}, tuple(said["ids"]), frozenset(), items, tuple(said["files"]))


def write_result(folder: RunFolder, result: dict[str, Any]) -> None:
    """Leave what came of a task for who started the ranks."""
    write_json(folder.path / _RESULT, result)


def read_result(folder: RunFolder) -> dict[str, Any] | None:
    """Read what `write_result` left, None if ranks came to no result."""
    path = folder.path / _RESULT
    return read_summary(path) if path.exists() else None
