"""Sums of bits, and who is named where they differ."""

import pytest
import torch
from ranks import RankPool

from parallel import copies
from parallel.control_of_run import connected
from parallel.copies import Copies, Copy, Noted, differences, sum_of_bits

HOSTS = ["north", "south", "east", "west"]


def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    odd, even = torch.randn(5, 3, generator=generator), torch.randn(12, generator=generator)
    return [odd, odd.bfloat16(), even[2:], even[3:9].clone()[1:5], even.bfloat16()[4:]]


def flip(tensor: torch.Tensor, place: int, bit: int) -> None:
    bits = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).view(-1)
    low = (1 << (8 * tensor.element_size() - 1)) - 1
    mask = 1 << bit if (1 << bit) <= low else -low - 1
    bits[place] ^= mask


def test_every_single_bit_changes_the_sum() -> None:
    tensors = weights()
    before = sum_of_bits(tensors)
    for tensor in tensors:
        for place in range(tensor.numel()):
            for bit in range(8 * tensor.element_size()):
                flip(tensor, place, bit)
                assert sum_of_bits(tensors) != before, (place, bit)
                flip(tensor, place, bit)
    assert sum_of_bits(tensors) == before


def test_sums_know_bits_that_numbers_hide_and_tensors_that_change_places() -> None:
    zeros, negative = torch.zeros(2), torch.tensor([0.0, -0.0])
    assert sum_of_bits([zeros]) != sum_of_bits([negative])
    one, two = torch.ones(3), torch.full((3,), 2.0)
    assert sum_of_bits([one, two]) != sum_of_bits([two, one])
    nan = torch.tensor([float("nan")])
    assert sum_of_bits([nan]) == sum_of_bits([nan.clone()])


def test_small_tensors_are_summed_together_as_if_each_were_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [*weights(), torch.zeros(0), torch.full((9,), -1, dtype=torch.int64)]
    together = sum_of_bits(tensors)
    monkeypatch.setattr(copies, "_SMALL", 0)
    assert sum_of_bits(tensors) == together


def test_more_small_tensors_start_no_more_kernels() -> None:
    def started(count: int) -> int:
        tensors = [torch.ones(8) for _ in range(count)]
        with torch.autograd.profiler.profile() as watched:
            sum_of_bits(tensors)
        names = [event.name for event in watched.function_events or ()]
        return sum(name in ("aten::sum", "aten::cumsum", "aten::cat", "aten::stack") for name in names)

    assert 0 < started(40) == started(4) < 8


def noted(ranks: tuple[int, ...], *sums: dict[int, int]) -> list[list[Noted]]:
    """What ranks noted of one copy that some of them hold."""
    found: list[list[Noted]] = [[] for _ in HOSTS]
    for rank, of in zip(ranks, sums, strict=True):
        found[rank] = [Noted("llm", ranks, of)]
    return found


def test_the_rank_that_differs_from_a_majority_is_named_with_the_first_step() -> None:
    found = noted((0, 1, 3), {4: 1, 5: 2, 6: 9}, {4: 1, 5: 7, 6: 8}, {4: 1, 5: 2, 6: 9})
    (line,) = differences(found, HOSTS)
    assert line.startswith("llm: step 5 is the first that computed with other bits on rank 1 on south; ")
    assert "the 2 others that agree" in line


def test_without_a_majority_all_are_named() -> None:
    (line,) = differences(noted((0, 2), {1: 5}, {1: 6}), HOSTS)
    assert "rank 0 on north, rank 2 on east" in line
    assert "no majority" in line
    (line,) = differences(noted((0, 1, 2, 3), {1: 5}, {1: 6}, {1: 5}, {1: 6}), HOSTS)
    assert all(f"rank {rank}" in line for rank in range(4))


def test_equal_copies_say_nothing() -> None:
    assert differences(noted((0, 1), {1: 5, 2: 6}, {1: 5, 2: 6}), HOSTS) == []


def test_bits_of_several_tensors_that_change_alike_do_not_cancel() -> None:
    tensors = [torch.zeros(2) for _ in range(4)]
    before = sum_of_bits(tensors)
    for count in (1, 2, 3, 4):
        flip(tensors[count - 1], 1, 31)
        assert sum_of_bits(tensors) != before, count


def _stay(rank: int) -> float:
    import torch.distributed as dist

    own = weights()
    if rank == 1:
        flip(own[2], 1, 30)  # for ever: four steps of it must not cancel
    copies = Copies([Copy("llm", own, dist.group.WORLD)], torch.device("cpu"))
    for step in range(1, 5):
        copies.note(step)
    return float(copies.differing())


def test_a_bit_that_stays_wrong_for_several_steps_is_found(ranks: RankPool) -> None:
    assert ranks.run(2, _stay) == [1.0, 1.0]


def _compare(rank: int, world: int) -> tuple[list[float], str]:
    import torch.distributed as dist

    own = weights()
    copies = Copies([Copy("llm", own, dist.group.WORLD)], torch.device("cpu"))
    found = []
    for step in range(1, 9):
        if (step, rank) == (6, 1):
            flip(own[1], 2, 15)
        copies.note(step)
        if (step, rank) == (6, 1):
            flip(own[1], 2, 15)  # as a gather of the weights would
        if step % 4 == 0:
            found.append(float(copies.differing()))
            if step < 8:
                copies.forget()
    return found, str(copies.explain(connected(rank, dist.get_world_size(), 60)))


@pytest.mark.parametrize("world", [2, 3])
def test_a_bit_that_was_wrong_for_one_step_is_found_at_the_next_comparison(
    ranks: RankPool, world: int
) -> None:
    answers = ranks.run(world, _compare, world)
    assert [found for found, _ in answers] == [[0.0, 1.0]] * world
    assert len({text for _, text in answers}) == 1
    text = answers[0][1]
    assert "step 6 is the first" in text
    assert "rank 1 on" in text
    assert ("rank 0 on" in text) == (world == 2)
