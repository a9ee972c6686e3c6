"""How the ranks of a node divide the reading of published weights: sizes of reads, bytes, memory, waits."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import RankPool
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dataloader.format import Sample
from dataloader.storage import Storage
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from omni.compose import compose_config
from omni.open_models import reads
from omni.open_models.folder import BYTES, Folder, open_folder
from omni.open_models.reads import Extent, Read, reads_of_node
from omni.planning.prepare import prepare_run
from omni.rank.folder_weights import FolderReader, Wanted, needs_of, wanted_by
from omni.rank.state import Piece
from omni.rehearsal.rehearse import owned_shards
from parallel.control_tree import Tree
from parallel.groups import node_group
from parallel.stalls import StallError

MIB = 2**20
LEAST, MOST = 8 * MIB, 64 * MIB
SMALL_GOAL = 40


@st.composite
def nodes(draw) -> tuple[list[tuple[str, int, int, int]], list[list[Extent]]]:
    """Tensors (file, origin, bytes of a row, rows), with gaps between some, and what each rank needs."""
    tensors, at = [], draw(st.integers(0, 9))
    for _ in range(draw(st.integers(1, 5))):
        width, rows = draw(st.integers(1, 12)), draw(st.sampled_from([1, 3, 20, 50]))
        tensors.append((draw(st.sampled_from("ab")), at, width, rows))
        at += width * rows + draw(st.sampled_from([0, 0, 7]))
    ranks = []
    for _ in range(draw(st.integers(1, 4))):
        own = set()
        for file, origin, width, rows in draw(st.lists(st.sampled_from(tensors), max_size=6)):
            low = draw(st.sampled_from([0, rows - 1]) | st.integers(0, rows - 1))
            high = draw(st.just(rows) | st.integers(low + 1, rows))
            left = draw(st.just(0) | st.integers(0, width - 1))
            right = draw(st.sampled_from([width, left + 1]))
            own.add(Extent(file, origin, width, (low, high), (left, right)))
        ranks.append(sorted(own, key=lambda need: (need.file, need.start, need.stop, need.columns)))
    return tensors, ranks


@given(nodes())
def test_reads_have_every_needed_byte_once_and_are_large(drawn):
    _, ranks = drawn
    with patch.object(reads, "GOAL", SMALL_GOAL):
        found = reads_of_node([[(need, need) for need in own] for own in ranks])
    assert [(one.file, one.start) for one in found] == sorted((one.file, one.start) for one in found)
    needs = [need for own in ranks for need in own]
    for one, after in pairwise(found):
        assert one.file != after.file or one.stop <= after.start
    whole = {(need.file, byte) for need in needs for byte in range(need.start, need.stop)}
    assert {(one.file, byte) for one in found for byte in range(one.start, one.stop)} == whole
    for rank, own in enumerate(ranks):
        rows: list[list[int]] = [[] for _ in own]
        for one in found:
            for part in one.parts:
                if part.rank == rank:
                    need, (low, high) = own[part.number], part.rows
                    rows[part.number] += range(low, high)
                    assert need.file == one.file
                    assert one.start <= need.origin + low * need.width + need.columns[0]
                    assert need.origin + (high - 1) * need.width + need.columns[1] <= one.stop
        assert rows == [[*range(*need.rows)] for need in own]
    widest = max((need.width for need in needs), default=0)
    for one in found:
        together = whole & {(one.file, byte) for byte in range(one.start - SMALL_GOAL, one.stop + SMALL_GOAL)}
        assert one.stop - one.start < 2 * SMALL_GOAL + widest
        if len(together) == one.stop - one.start + 2 * SMALL_GOAL:
            assert one.stop - one.start > SMALL_GOAL - widest


def test_scales_are_read_before_the_numbers_that_they_are_for():
    numbers = [Extent("a", 0, 100, (low, low + 1), (0, 100)) for low in range(4)]
    scales = Extent("b", 0, 2, (0, 4), (0, 2))
    found = reads_of_node(
        [[(scales, numbers[2]), *((of, of) for of in numbers[2:])], [(numbers[0], numbers[0])]]
    )
    assert [(one.file, one.start) for one in found] == [("a", 0), ("b", 0), ("a", 200)]


# A synthetic model of 70 B parameters, as Llama 3 has them, in files that are headers and nothing.
SEVENTY = {
    **{"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
    **{"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5},
    **{"rope_theta": 500000.0, "tie_word_embeddings": False, "hidden_act": "silu"},
}


# Numbers of a layer, and of the embedding, the output layer and the last norm.
OF_A_LAYER = 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672 + 2)
BESIDE_LAYERS = 8192 * (2 * 128256 + 1)
assert 80 * OF_A_LAYER + BESIDE_LAYERS == 70_553_706_496


def headers_alone(folder: Path, config: dict, of_file: int, dtype: str = "BF16") -> None:
    """Write a folder whose files have headers, and holes for data: at most so many bytes each, if no tensor
    is larger.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    source = open_folder(str(folder))
    files: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, rules in source.names.items():
        shape = rules[0][0].shapes[rules[0][1]]
        size = int(np.prod(shape)) * BYTES[dtype]
        if held + size > of_file and files[-1]:
            files.append({})
            held = 0
        files[-1][name] = shape
        held += size
    placed = {}
    for number, tensors in enumerate(files, start=1):
        name, at, described = f"model-{number:05}-of-{len(files):05}.safetensors", 0, {}
        for key, shape in tensors.items():
            size = int(np.prod(shape)) * BYTES[dtype]
            described[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
            placed[key] = name
        text = json.dumps(described).encode()
        text += b" " * (-len(text) % 8)
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + at)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def shards_of(
    folder: Path, data: Path, ranks: Sequence[int], world: int, *more: str
) -> list[dict[str, tuple[Piece, bool]]]:
    """What ranks of a world that is not there own of the LLM in a folder, as training would build them, and
    whether a rank before them holds the same.
    """
    if not data.exists():
        with DatasetWriter(data, ByteTokenizer()) as writer:
            writer.add(Sample("one", "a text"))
    line = [
        "~experiment",
        "system=multiplexed",
        f"start.weights={folder}",
        f"+data.sources.texts.path={data}",
        "train.steps=1",
    ]
    line += ["data.microbatch_tokens=64", f"data.step_samples={world}", "optim.lr=1e-3", "cluster=h100"]
    config = compose_config([*line, "tracking=jsonl", f"run.dir={data.parent / 'run'}", *more])
    spec = prepare_run(config, world)
    return [{key.removeprefix("llm/"): of for key, of in owned_shards(spec, rank).items()} for rank in ranks]


def wanted_by_pieces(folder: Folder, pieces: dict[str, Piece], dtype: torch.dtype | None) -> list[Wanted]:
    """What a rank with these shards wants; without `dtype` nothing has room."""
    found: list[Wanted] = []
    for name, piece in pieces.items():
        where, kind = ("meta", torch.float32) if dtype is None else ("cpu", dtype)
        target = torch.empty(piece.count, dtype=kind, device=where)
        found += wanted_by(folder, name, piece.region, piece.start, target)
    return found


@dataclass
class Dry:
    """What the ranks of a node would read; `room` is the most that any rank holds in a round, in bytes."""

    reads: list[Read]
    bytes: int
    room: int


def dry_run(folder: Folder, node: Sequence[dict[str, Piece]]) -> Dry:
    needs = [list(needs_of(wanted_by_pieces(folder, of, None)).items()) for of in node]
    found = reads_of_node(needs)
    room = 0
    for first in range(0, len(found), len(node)):
        turn = found[first : first + len(node)]
        held = [one.stop - one.start for one in turn] + [0] * (len(node) - len(turn))
        moved = np.zeros((len(node), len(node)), np.int64)
        for source, one in enumerate(turn):
            for part in one.parts:
                rows = part.rows[1] - part.rows[0]
                moved[source, part.rank] += rows * needs[part.rank][part.number][0].row
        for rank, own in enumerate(held):
            others = [of for of in range(len(node)) if of != rank]
            swaps = [moved[rank, of] for of in others], [moved[of, rank] for of in others]
            room = max(room, own + sum(int(max(of, default=0)) for of in swaps))
    return Dry(found, sum(one.stop - one.start for one in found), room)


LAYOUTS = {
    "tp8 pp4 dp2": ("layout.llm.tp=8", "layout.llm.pp=4"),
    "tp2 pp4 dp8": ("layout.llm.tp=2", "layout.llm.pp=4"),
    "dp64": (),
}


@pytest.mark.parametrize(
    ("layout", "nodes", "layers"),
    [
        ("tp8 pp4 dp2", (3,), 80),
        # Of layers as large, fewer: a fifth of the headers.
        pytest.param("tp8 pp4 dp2", range(8), 16, marks=pytest.mark.slow),
        pytest.param("tp2 pp4 dp8", (1, 7), 16, marks=pytest.mark.slow),
        pytest.param("dp64", (7,), 16, marks=pytest.mark.slow),
    ],
)
def test_the_nodes_of_64_ranks_read_a_model_of_70_b_in_large_ranges_dry(tmp_path, layout, nodes, layers):
    headers_alone(tmp_path / "model", SEVENTY | {"num_hidden_layers": layers}, 5 * 10**9)
    folder = open_folder(str(tmp_path / "model"))
    folder.check()
    total = 0
    for node in nodes:
        ranks = range(8 * node, 8 * node + 8)
        owned_by = shards_of(tmp_path / "model", tmp_path / "texts", ranks, 64, *LAYOUTS[layout])
        # What tensor-parallel ranks hold alike is read once.
        needed = 2 * sum(piece.count for own in owned_by for piece, is_copy in own.values() if not is_copy)
        dry = dry_run(folder, [{key: piece for key, (piece, _) in own.items()} for own in owned_by])
        assert needed <= dry.bytes <= 1.1 * needed
        total += dry.bytes
        assert_large([(one.file, one.start, one.stop) for one in dry.reads])
        assert dry.room <= MOST
        sizes = [(one.stop - one.start) / MIB for one in dry.reads]
        print(
            f"{layout}, node {node}: {dry.bytes / MIB:,.0f} MiB, {dry.bytes / needed:.4f} of what it needs, "
            f"in {len(sizes)} reads of {min(sizes):.2f} to {max(sizes):.2f} MiB, "
            f"{dry.room / MIB:.1f} MiB held"
        )
    if len(nodes) == 8:
        size = sum(of.stop - of.start for of in folder.tensors.values())
        assert size == 2 * (layers * OF_A_LAYER + BESIDE_LAYERS)
        assert size <= total <= 1.01 * size


def assert_large(found: Sequence[tuple[str, int, int]]) -> None:
    """Where 8 MiB lie together, no read of them is smaller."""
    together: list[list[tuple[str, int, int]]] = []
    for one in sorted(found):
        if together and together[-1][-1][0] == one[0] and together[-1][-1][2] == one[1]:
            together[-1].append(one)
        else:
            together.append([one])
    for of in together:
        if of[-1][2] - of[0][1] >= LEAST:
            assert min(stop - start for _, start, stop in of) >= LEAST


# Real files of nearly 2 GiB.
TWO = {**SEVENTY, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2}
TWO |= {"num_attention_heads": 32, "vocab_size": 64128}


class Counted:
    """An open file that notes what is read of it."""

    def __init__(self, file: Any, name: str, found: list[tuple[str, int, int]]) -> None:
        self.file, self.name, self.found = file, name, found

    def __enter__(self) -> "Counted":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def seek(self, at: int) -> None:
        self.at = at
        self.file.seek(at)

    def readinto(self, room: memoryview) -> int:
        count = int(self.file.readinto(room))
        self.found.append((self.name, self.at, self.at + count))
        self.at += count
        return count


class Memory(TorchDispatchMode):
    """The most bytes that tensors made inside hold at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {of.untyped_storage()._cdata for of in tree_leaves((args, kwargs)) if is_tensor(of)}
        out = func(*args, **(kwargs or {}))
        self.live = {key: of for key, of in self.live.items() if not of[0].expired()}
        for of in filter(is_tensor, tree_leaves(out)):
            storage = of.untyped_storage()
            if storage._cdata not in known and storage._cdata not in self.live:
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(size for _, size in self.live.values()))
        return out


def is_tensor(of: object) -> bool:
    return isinstance(of, torch.Tensor)


def read_two(rank: int, url: str, owned_by: list[dict[str, Piece]]) -> tuple[list, int, int, float]:
    """Read this rank's shards. Returns its reads, the most bytes that it held, how many of its elements are
    not those of the files, and seconds.
    """
    folder = open_folder(url)
    wanted = wanted_by_pieces(folder, owned_by[rank], torch.bfloat16)
    found: list[tuple[str, int, int]] = []
    original = Storage.open

    def counting(storage: Storage, name: str) -> Counted:
        return Counted(original(storage, name), name, found)

    memory, start = Memory(), time.monotonic()
    with node_group(Tree(2, 2), timedelta(seconds=60)) as group:
        reader = FolderReader(folder, group)
        with patch.object(Storage, "open", counting), memory:
            reader.fill(wanted)
    seconds = time.monotonic() - start
    assert reader.problem is None
    assert reader.bytes == sum(stop - begin for _, begin, stop in found)
    return found, memory.most, sum(map(partial(differing, folder), wanted)), seconds


def differing(folder: Folder, each: Wanted) -> int:
    of, box = each.stored.data, each.box
    data = np.memmap(folder.storage.path(of.file), np.int16, "r", of.start, (of.stop - of.start) // 2)
    theirs = data.reshape(of.shape[0], -1)[slice(*box.rows), slice(*box.columns)]
    target = each.target.view(torch.int16)
    ours = target.as_strided(theirs.shape, (box.stride, 1), target.storage_offset() + box.at).numpy()
    return int((ours != theirs).sum())


def stamp(folder: Path) -> None:
    """Write numbers into the holes of a folder's files: in every tensor at some places, at its ends too."""
    rng = np.random.default_rng(0)
    for of in open_folder(str(folder)).tensors.values():
        size = of.stop - of.start
        room = min(size, 4096)
        with (folder / of.file).open("r+b") as file:
            for at in (0, size - room, *(2 * rng.integers(0, max(1, (size - room) // 2), 60))):
                file.seek(of.start + int(at))
                file.write(rng.integers(1, 256, room, dtype=np.uint8).tobytes())


@pytest.mark.slow  # it reads 2 GiB
@pytest.mark.parametrize("layout", [("layout.llm.tp=2",), ()])
def test_two_ranks_read_two_gib(ranks: RankPool, tmp_path, layout):
    headers_alone(tmp_path / "model", TWO, 10**9)
    stamp(tmp_path / "model")
    size = sum(of.stop - of.start for of in open_folder(str(tmp_path / "model")).tensors.values())
    assert size >= 1.75 * 2**30
    owned_by = shards_of(tmp_path / "model", tmp_path / "texts", range(2), 2, *layout)
    pieces = [{key: piece for key, (piece, _) in own.items()} for own in owned_by]
    results = ranks.run(2, read_two, str(tmp_path / "model"), pieces)
    found = [of for rank in results for of in rank[0]]
    sizes = [(stop - start) / MIB for _, start, stop in found]
    print(
        f"{size / MIB:,.0f} MiB in {len(found)} reads of {min(sizes):.2f} to {max(sizes):.2f} MiB by two "
        f"ranks, {[len(of[0]) for of in results]} each, who held "
        f"{[round(of[1] / MIB, 1) for of in results]} MiB, in {max(of[3] for of in results):.1f} s"
    )
    assert [of[2] for of in results] == [0, 0]
    assert sum(stop - start for _, start, stop in found) == size
    assert_large(found)
    assert max(of[1] for of in results) <= MOST


def one_sleeps(rank: int, url: str, owned_by: list[dict[str, Piece]]) -> str:
    """What a rank says that reads with one that hands nothing on."""
    folder = open_folder(url)
    wanted = wanted_by_pieces(folder, owned_by[rank], torch.float32)
    with node_group(Tree(2, 2), timedelta(seconds=2)) as group:
        reader = FolderReader(folder, group)
        if rank == 1:
            with (
                patch.object(FolderReader, "_round", lambda *_: time.sleep(4)),
                pytest.raises(AssertionError),
            ):
                reader.fill(wanted)
            return ""
        with pytest.raises(StallError) as error:
            reader.fill(wanted)
        return str(error.value)


def test_a_rank_that_hands_nothing_on_is_named_in_time(ranks: RankPool, tmp_path):
    small = {**TWO, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "vocab_size": 272}
    headers_alone(tmp_path / "model", small, 10**9)
    pieces = shards_of(tmp_path / "model", tmp_path / "texts", range(2), 2, "layout.llm.tp=2")
    owned_by = [{key: piece for key, (piece, _) in own.items()} for own in pieces]
    text, _ = ranks.run(2, one_sleeps, str(tmp_path / "model"), owned_by)
    assert "rank 0 waited at weights that its node reads for rank 1" in text
