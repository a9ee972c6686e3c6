"""How the boundary must behave, in cases that bridges between two layouts have been known to get wrong."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from random_routes import carry

from dataloader.format import PLACEHOLDER, DataError, Item, Sample
from dataloader.loader import Fetched
from dataloader.tokenizer import ByteTokenizer
from dataloader.tokens import ItemMeta, SampleMeta, item_row_offsets, text_tokens, tokenize
from omni.llm_config import LLMConfig
from omni.rank.inputs import Assembler, Place
from parallel.boundary import Route, Rows, make_route
from parallel.lane import Lane
from parallel.layout import split_evenly
from parallel.packed import PackedTokens
from parallel.sequence import SequenceLayout
from parallel.shipping import Ends, make_ends, ship
from pipeline.domain_plan import DomainPlan, Microbatch, PlannedSample

CPU = torch.device("cpu")
WIDTH = 4
Carry = Callable[[list[Ends], list[torch.Tensor]], list[torch.Tensor]]


# One layout against another.


@dataclass(frozen=True)
class TwoLayouts:
    """Encoders TP·DP and an LLM TP·DP over the same ranks, and items of `rows` rows in the order of slots.

    Encoder replicas and LLM replicas each take equal, consecutive shares of the items, as near as can be. A
    replica of the LLM packs its items with two tokens of text before each, on one axis with all replicas.
    """

    encoder_tp: int
    encoder_dp: int
    llm_tp: int
    llm_dp: int
    rows: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        assert self.encoder_tp * self.encoder_dp == self.llm_tp * self.llm_dp
        return self.llm_tp * self.llm_dp

    def items_of(self, replica: int, dp: int) -> range:
        shares = split_evenly(len(self.rows), dp)
        return range(sum(shares[:replica]), sum(shares[: replica + 1]))

    def rows_before(self, item: int) -> int:
        return sum(self.rows[:item])

    def encoded_by(self, rank: int) -> range:
        """Rows, counted over all items, that a rank puts out: its part of what its encoder replica does."""
        replica, part = divmod(rank, self.encoder_tp)
        items = self.items_of(replica, self.encoder_dp)
        first, stop = self.rows_before(items.start), self.rows_before(items.stop)
        shares = split_evenly(stop - first, self.encoder_tp)
        return range(first + sum(shares[:part]), first + sum(shares[: part + 1]))

    def tokens(self, replica: int) -> int:
        return sum(2 + self.rows[i] for i in self.items_of(replica, self.llm_dp))

    def position(self, row: int) -> int:
        """Where a row stands on the axis of all replicas: two tokens of text precede each item."""
        item = next(i for i in range(len(self.rows)) if row < self.rows_before(i + 1))
        return row + 2 * (item + 1)

    def route(self) -> Route:
        lengths = [self.tokens(replica) for replica in range(self.llm_dp)]
        layout = SequenceLayout.whole(lengths, range(self.llm_dp), self.llm_dp)
        runs = []
        for rank in range(self.num_ranks):
            mine = self.encoded_by(rank)
            for item in range(len(self.rows)):
                first = max(mine.start, self.rows_before(item))
                stop = min(mine.stop, self.rows_before(item + 1))
                if first < stop:
                    runs.append(Rows(rank, first - mine.start, self.position(first), stop - first))
        return make_route(runs, layout.intervals(self.llm_tp), self.num_ranks)

    def shard(self, packed: torch.Tensor, rank: int) -> torch.Tensor:
        """What a rank holds of its replica's tokens, padded to a multiple of tp."""
        replica, part = divmod(rank, self.llm_tp)
        first = sum(self.tokens(before) for before in range(replica))
        tokens = packed[first : first + self.tokens(replica)]
        share = -(-len(tokens) // self.llm_tp)
        padded = torch.cat([tokens, tokens.new_zeros(share * self.llm_tp - len(tokens), WIDTH)])
        return padded[part * share : (part + 1) * share]


def check(case: TwoLayouts, route: Route, ranks: list[int], carry: Carry) -> None:
    """Check what `ranks` get; `carry` brings their rows, given the ends and rows of those ranks."""
    generator = torch.Generator().manual_seed(0)
    total = sum(case.rows)
    encoded = torch.randn(total, WIDTH, generator=generator)
    places = torch.tensor([case.position(row) for row in range(total)])
    packed = torch.randn(2 * len(case.rows) + total, WIDTH, generator=generator)
    ends = [make_ends(route, rank) for rank in ranks]

    # Forward: concatenation or slicing in the order of slots.
    own = [encoded[case.encoded_by(rank).start : case.encoded_by(rank).stop] for rank in ranks]
    arrived = carry(ends, [rows[e.send] for rows, e in zip(own, ends, strict=True)])
    expected = packed.clone()
    expected[places] = encoded
    for rank, e, rows in zip(ranks, ends, arrived, strict=True):
        embeddings = case.shard(packed, rank).clone()
        embeddings[e.receive] = rows
        assert torch.equal(embeddings, case.shard(expected, rank)), f"rank {rank}"

    # Backward: each replica of the LLM gives the gradients of its slice, at its offset, and they add up.
    grads = torch.randn(packed.shape, generator=generator)
    siblings = []
    for replica in range(case.llm_dp):
        items = case.items_of(replica, case.llm_dp)
        slice_ = range(case.rows_before(items.start), case.rows_before(items.stop))
        siblings.append(torch.zeros(total, WIDTH))
        siblings[-1][slice_.start : slice_.stop] = grads[places[slice_.start : slice_.stop]]
    expected = torch.stack(siblings).sum(0)
    back = [e.transpose() for e in ends]
    returned = carry(back, [case.shard(grads, r)[e.send] for r, e in zip(ranks, back, strict=True)])
    for rank, e, rows in zip(ranks, back, returned, strict=True):
        of_rank = torch.full((len(case.encoded_by(rank)), WIDTH), 9.0)
        of_rank[e.receive] = rows
        assert torch.equal(of_rank, expected[case.encoded_by(rank).start : case.encoded_by(rank).stop])


RAGGED = (3, 5, 0, 7, 1, 4, 2, 6, 5)
CASES = {
    "encoder tp2·dp4, LLM tp4·dp2": TwoLayouts(2, 4, 4, 2, RAGGED),
    "encoder tp4·dp2, LLM tp2·dp4": TwoLayouts(4, 2, 2, 4, RAGGED),
    "not divisible: encoder dp6, LLM tp3·dp2": TwoLayouts(1, 6, 3, 2, RAGGED),
    "not divisible: encoder tp2·dp3, LLM tp3·dp2": TwoLayouts(2, 3, 3, 2, RAGGED),
    "not divisible: encoder tp3·dp2, LLM tp2·dp3": TwoLayouts(3, 2, 2, 3, RAGGED),
    "encoder replicas without items": TwoLayouts(2, 4, 4, 2, (5, 2)),
}


@pytest.mark.parametrize("transport", ["direct", "two_level", "reduce_scatter"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_any_layout_against_any_other_is_exact(case, transport):
    nodes = tuple(rank // 4 for rank in range(case.num_ranks))
    check(case, case.route().over(transport, nodes), list(range(case.num_ranks)), carry)


def test_in_a_fan_out_every_encoder_replica_serves_several_replicas_of_the_llm():
    """So the cases above can fail: gradients of one sibling are not those of all."""
    case = CASES["encoder tp4·dp2, LLM tp2·dp4"]
    served = {(s.source // case.encoder_tp, s.destination // case.llm_tp) for s in case.route().segments}
    assert served == {(0, 0), (0, 1), (1, 2), (1, 3)}


def on_real_ranks(rank: int, cases: list[TwoLayouts]) -> None:
    lanes = {False: Lane(CPU), True: Lane(CPU)}

    def send(ends: list[Ends], outgoing: list[torch.Tensor]) -> list[torch.Tensor]:
        back = ends[0].transport == "two_level_back"
        shipment = ship(ends[0], outgoing[0], dist.group.WORLD, lanes[back])
        if shipment.work is not None:
            shipment.work.wait()
        return [shipment.rows]

    for case in cases:
        for transport in ("direct", "two_level"):
            check(case, case.route().over(transport, (0, 0, 1, 1)), [rank], send)


def test_layouts_against_each_other_are_exact_on_real_ranks(ranks):
    shapes = [(2, 2, 4, 1), (4, 1, 2, 2), (1, 4, 2, 2), (2, 2, 1, 4), (1, 4, 4, 1), (4, 1, 1, 4)]
    ranks.run(4, on_real_ranks, [TwoLayouts(*shape, RAGGED) for shape in shapes])


# Fan-in of different counts.


def fan_in(rank: int) -> tuple[list[float], list[float]]:
    """Ranks 0 and 1 encode 3 and 5 rows; all eight belong to rank 0."""
    layout = SequenceLayout.whole([10], [0], 2)
    route = make_route([Rows(0, 0, 1, 3), Rows(1, 0, 5, 5)], layout.intervals(), 2)
    ends = make_ends(route, rank)
    mine = torch.arange(3.0 if rank == 0 else 5.0).unsqueeze(1) + 10 * (rank + 1)
    sent = ship(ends, mine[ends.send], dist.group.WORLD)
    assert sent.work is not None
    sent.work.wait()
    tokens = torch.zeros(10 if rank == 0 else 0, 1)
    tokens[ends.receive] = sent.rows
    grads = torch.arange(len(tokens), dtype=torch.float32).unsqueeze(1)
    returned = ship(ends.transpose(), grads[ends.receive], dist.group.WORLD)
    assert returned.work is not None
    returned.work.wait()
    back = torch.zeros_like(mine)
    back[ends.send] = returned.rows
    return tokens.flatten().tolist(), back.flatten().tolist()


def test_fan_in_of_three_and_five_rows_gives_eight_and_three_and_five_gradients_back(ranks):
    (tokens, first), (nothing, second) = ranks.run(2, fan_in)
    assert tokens == [0, 10, 11, 12, 0, 20, 21, 22, 23, 24]
    assert nothing == []
    assert first == [1, 2, 3]
    assert second == [5, 6, 7, 8, 9]


# Placeholders and rows.

BYTES = ByteTokenizer()


def document(name: str, text: str, rows: tuple[int, ...]) -> tuple[Sample, SampleMeta]:
    sample = Sample(name, text, tuple(Item("image", "png", (8, 8), b"x") for _ in rows))
    text = text_tokens(sample, BYTES)
    tokens, ats = len(text.ids), text.items
    items = tuple(ItemMeta("image", 4 * n, n, at, (8, 8)) for n, at in zip(rows, ats, strict=True))
    return sample, SampleMeta(0, "here", tokens, items, 0)


def test_every_placeholder_token_gets_one_row_and_no_other_token_does():
    """A microbatch of three samples over two pipeline-pool cp ranks of two ranks; rank 4 encodes."""
    documents = [
        document("a", f"x{PLACEHOLDER}y", (3,)),
        document("plain", "only text", ()),
        document("b", f"{PLACEHOLDER}{PLACEHOLDER}zz", (2, 5)),
    ]
    ids = [tokenize(sample, meta, BYTES)[0] for sample, meta in documents]
    layout = SequenceLayout.whole([len(x) for x in ids], [1, 0, 1], 2)
    runs, start, filled = [], 0, 0
    for (_, meta), own in zip(documents, ids, strict=True):
        for item, offset in zip(meta.items, item_row_offsets(meta), strict=True):
            runs.append(Rows(4, filled, start + offset, item.rows))
            filled += item.rows
        start += len(own)
    route = make_route(runs, layout.intervals(2), 5)
    packed = [int(token) for own in ids for token in own]
    placeholders = [at for at, token in enumerate(packed) if token == BYTES.item]
    places = {(i.rank, i.local_start + k): i.start + k for i in layout.intervals(2) for k in range(i.length)}
    filled_places = [
        places[rank, local] for rank in range(4) for local in make_ends(route, rank).receive.tolist()
    ]
    assert sorted(filled_places) == placeholders
    assert len(placeholders) == route.num_rows == 10


@pytest.mark.parametrize("change", ["one item less", "one item more"])
def test_another_number_of_placeholders_than_items_is_an_error_that_names_the_sample(change):
    # More such cases are in tests/dataloader/test_sample_tokens.py and tests/e2e/test_bad_input.py.
    sample, meta = document("picture-7", f"x{PLACEHOLDER}y{PLACEHOLDER}", (3, 2))
    items = meta.items[:1] if change == "one item less" else (*meta.items, meta.items[-1])
    with pytest.raises(DataError, match=r"sample 'picture-7' .* 2 placeholders, not [13]"):
        tokenize(sample, replace(meta, items=items), BYTES)


def test_rows_for_other_positions_than_the_pack_has_are_an_error():
    layout = SequenceLayout.whole([6], [0], 1)
    with pytest.raises(AssertionError, match="only 2 of 3 rows have a place"):
        make_route([Rows(0, 0, 4, 3)], layout.intervals(), 1)


def test_a_batch_of_text_alone_needs_no_rows_and_no_communicator():
    route = make_route([], SequenceLayout.whole([6, 4], [0, 1], 2).intervals(2), 4)
    assert route.is_local
    for rank in range(4):
        for ends in (make_ends(route, rank), make_ends(route, rank).transpose()):
            shipment = ship(ends, torch.zeros(0, WIDTH), None)
            assert shipment.work is None
            assert shipment.rows.shape == (0, WIDTH)


# Packed lengths.


def packs_of_six_and_four(stages: int, tp: int) -> list[PackedTokens]:
    """What the assembler gives each rank of a pipeline for a microbatch of samples of six and four tokens."""
    lengths = (6, 4)
    batch = Microbatch((0, 1), SequenceLayout.whole(lengths, [0, 0], 1), ((), ()))
    domain = DomainPlan(
        team=tp,
        holds=tuple((stage,) for stage in range(stages)),
        pool=1,
        tp=tp,
        collective_group=tp,
        llm=0,
        homes=((0, stages * tp),),
        samples=tuple(PlannedSample("here", i, n, ((0, n),)) for i, n in enumerate(lengths)),
        microbatches=(batch,),
        items=(),
        encoder_batches=(),
        routes=(None,),
        ops=(),
    )
    llm = LLMConfig(layers=stages, hidden=32, heads=4, kv_heads=2, ffn=32)
    packs = []
    for domain_rank in range(domain.num_ranks):
        assembler = Assembler(llm, {}, ("here",), Place(domain_rank, CPU, torch.float32))
        texts = [(np.arange(n), np.arange(n), np.ones(n, bool)) for n in lengths]
        fetched = Fetched(texts if assembler.reads_text(domain) else [], [], ())
        (inputs,) = assembler.assemble(domain, fetched, predict=False).microbatches
        packs.append(inputs.packed)
    return packs


@pytest.mark.parametrize("tp", [1, 2])
def test_packed_lengths_six_and_four_have_their_edges_at_0_6_10_on_every_stage(tp):
    """The first stage reads the tokens and the last one the targets; the middle stage has the plan alone."""
    packs = packs_of_six_and_four(3, tp)
    assert len(packs) == 3 * tp
    for packed in packs:
        for edges in (packed.packing.cu_seqlens, packed.cu_seqlens_q, packed.cu_seqlens_kv):
            assert edges.tolist() == [0, 6, 10]
            assert edges.dtype == torch.int32
        assert packed.max_seqlen_q == 6
        assert packed.rotary is not None
        for of_stage, of_first in zip(packed.rotary, packs[0].rotary, strict=True):
            assert torch.equal(of_stage[6:], of_stage[:4]), "positions start again with the second sample"
            assert torch.equal(of_stage, of_first)
