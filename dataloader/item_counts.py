"""What encoders make of items, by modality and size: asked for once, looked up for many items together."""

from collections.abc import Callable, Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt

from dataloader.format import SampleError

ItemCounts = Callable[[str, tuple[int, ...]], tuple[int, int]]
"""From an item's modality and size to (encoder tokens, LLM rows): the encoder registry's answer. It raises
SampleError, with the remedy, for an item that its encoder cannot take.
"""

REFUSED = -1  # rows of an item that its encoder cannot take
_UNKNOWN = -2
_MOST_ANSWERS = 1 << 17  # some 40 MB


class RememberedCounts:
    """`ItemCounts` that asks once for items of equal modality and size, as long as its memory has room."""

    def __init__(self, item_counts: ItemCounts) -> None:
        self._item_counts = item_counts
        # (tokens, rows, why the item is refused or ""), and each number alone for looking up many at once: by
        # modality and number of dimensions, then by the dimensions packed into one integer.
        self._answers: dict[tuple[str, tuple[int, ...]], tuple[int, int, str]] = {}
        self._rows: dict[tuple[str, int], dict[int, int]] = {}
        self._tokens: dict[tuple[str, int], dict[int, int]] = {}

    def __call__(self, modality: str, size: tuple[int, ...]) -> tuple[int, int]:
        """(encoder tokens, LLM rows) of an item. Raises SampleError if its encoder cannot take it."""
        tokens, rows, refused = self._answer(modality, size)
        if refused:
            raise SampleError(refused)
        return tokens, rows

    def rows(
        self, modality: str, sizes: Sequence[npt.NDArray[np.int32]], count: int
    ) -> npt.NDArray[np.int64]:
        """LLM rows of `count` items of one modality, int64 [count], `REFUSED` for one that is not taken.

        `sizes` are the items' sizes, one array [count] a dimension.
        """
        known = self._rows.setdefault((modality, len(sizes)), {})
        return self._look_up(known, lambda tokens, rows: rows, modality, sizes, count)

    def tokens(
        self, modality: str, sizes: Sequence[npt.NDArray[np.int32]], count: int
    ) -> npt.NDArray[np.int64]:
        """Encoder tokens of `count` items of one modality, int64 [count], as `rows`."""
        known = self._tokens.setdefault((modality, len(sizes)), {})
        return self._look_up(known, lambda tokens, rows: tokens, modality, sizes, count)

    def _look_up(
        self,
        known: dict[int, int],
        wanted: Callable[[int, int], int],
        modality: str,
        sizes: Sequence[npt.NDArray[np.int32]],
        count: int,
    ) -> npt.NDArray[np.int64]:
        """Look up many items among the `known` ones; ask for the others, of whose numbers one is `wanted`."""
        # Two dimensions of 31 bits fit an int64; Python's integers hold more.
        code = np.zeros(count, dtype=np.int64 if len(sizes) <= 2 else object)
        for dimension in sizes:
            code = code << 31 | dimension
        keys = code.tolist()
        found = np.fromiter(map(known.get, keys, repeat(_UNKNOWN)), np.int64, count)
        unknown = np.flatnonzero(found == _UNKNOWN)
        if len(unknown):
            tuples = zip(*(dimension[unknown].tolist() for dimension in sizes), strict=True)
            for place, size in zip(unknown.tolist(), tuples, strict=True):
                tokens, rows, refused = self._answer(modality, size)
                known[keys[place]] = found[place] = REFUSED if refused else wanted(tokens, rows)
        return found

    def _answer(self, modality: str, size: tuple[int, ...]) -> tuple[int, int, str]:
        answer = self._answers.get((modality, size))
        if answer is not None:
            return answer
        if len(self._answers) == _MOST_ANSWERS:
            self._answers.clear()
            for known in (*self._rows.values(), *self._tokens.values()):
                known.clear()
        try:
            tokens, rows = self._item_counts(modality, size)
            answer = tokens, rows, ""
        except SampleError as error:
            answer = 0, 0, str(error)
        self._answers[modality, size] = answer
        return answer
