"""A rank that is slow to read is waited for while it reads on: a store may be slow to one of them."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore

from dataloader.storage import Storage
from omni.training import loading
from parallel.control import Control
from parallel.control_tree import Tree

TIMEOUT_S = 1.5
PIECES = 10


def test_ranks_wait_for_one_that_reads_a_checkpoint_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_state(
        index: Any, read: Any, components: Any, names: Any, stage: Any, rank: int, *_: Any
    ) -> None:
        assert len(list(read(rank, ()))) == PIECES

    def pieces(storage: Any, manifest: Any, asked: Any) -> Any:
        for number in range(PIECES):
            time.sleep(0.3 * asked[0])  # of rank 1 alone
            yield number, None

    for name, own in {"read_state": read_state, "_read": pieces, "spread_weights": lambda _: None}.items():
        monkeypatch.setattr(loading, name, own)
    store, manifest = HashStore(), {"index": [], "step": 1, "files": {}}

    def load(number: int) -> str | None:
        control = Control(number, Tree(2, 2), store, b"s" * 32, TIMEOUT_S)
        rank = cast(Any, SimpleNamespace(rank=number, names={}, stage=0))
        try:
            return loading.load(cast(Storage, None), manifest, rank, control, {})
        finally:
            control.close()

    start = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(load, range(2))) == [None, None]
    assert time.monotonic() - start > TIMEOUT_S
