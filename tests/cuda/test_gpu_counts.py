"""Launches, bytes, waits and copies of a step on a GPU only go down: benchmarks/gpu_counts.py counts."""

import pytest
import torch
from counted import PARTS, benchmark, dense_figures, normed_figures, other_figures
from fake_gpu import FakeGPU

from omni.rehearsal.kernels import kernels_of

# The most that each may be today. Whoever makes one smaller writes it down here; goals are the benchmark's.
DENSE = {
    "LLM layer, forward": 11,
    "LLM layer, backward": 21,
    "LLM layer, backward, selective": 24,
    "encoder layer, forward": 11,
    "encoder layer, backward": 24,
    "bytes by the least, LLM layer of 1B": 1.04,
    "bytes by the least, encoder layer": 1.17,
    "bytes by the least, update": 1.07,  # the norm reads gradients once more
    "waits, dense step": 0,
    "copies to the device": 1,
    "launches, gradients of tied embeddings": 21,
    "launches, totals": 5,
    "launches, update": 23,  # of which 19 divide and clip, so that the device waits for no host
}
NORMED = {
    "LLM layer with normed heads, forward": 11,
    "LLM layer with normed heads, backward": 22,
    "bytes by the least, LLM layer with normed heads": 1.03,
    "LLM layer with gated heads, forward": 12,
    "LLM layer with gated heads, backward": 23,
    "bytes by the least, LLM layer with gated heads": 1.06,
    "LLM layer with norms around, forward": 12,
    "LLM layer with norms around, backward": 26,
    "bytes by the least, LLM layer with norms around": 1.08,
}
OTHERS = {
    "more with cp, forward": 9,
    "more with cp, backward": 9,
    "MoE layer of 4 experts, forward": 35,
    "MoE layer of 4 experts, backward": 54,
    "MoE layer of many experts, forward": 35,
    "MoE layer of many experts, backward": 54,
    "waits, MoE step, ep 1": 0,
    "waits a layer and microbatch, MoE step, ep 2": 1,
    "bytes by the least, LLM layer of 8B": 1.04,
    "loss of 8B, forward": 16,
    "loss of 8B, backward": 11,
    "bytes by the least, loss of 8B": 1.04,
}


def test_a_dense_step_launches_moves_and_waits_no_more_than_it_did(gpu: FakeGPU) -> None:
    figures = gpu.run(dense_figures)
    assert figures.keys() == DENSE.keys()
    assert {name: figure for name, figure in figures.items() if figure > DENSE[name]} == {}


def test_layers_with_more_norms_launch_and_move_no_more_than_they_did(gpu: FakeGPU) -> None:
    figures = gpu.run(normed_figures)
    assert figures.keys() == NORMED.keys()
    assert {name: figure for name, figure in figures.items() if figure > NORMED[name]} == {}


@pytest.mark.slow
def test_shared_sequences_experts_and_losses_launch_no_more_than_they_did(gpu: FakeGPU) -> None:
    figures = {}
    for part in PARTS:
        figures |= gpu.run(other_figures, part)
    assert figures.keys() == OTHERS.keys()
    assert {name: figure for name, figure in figures.items() if figure > OTHERS[name]} == {}


def test_every_goal_but_that_of_a_whole_step_has_a_ceiling() -> None:
    assert {*benchmark().GOALS} - {*DENSE, *NORMED, *OTHERS} == {"memory-bound time by products, 1B"}


def test_an_operator_counts_as_the_kernels_that_it_launches() -> None:
    aten = torch.ops.aten
    x = torch.empty(8, 4)
    cases = (
        (aten.mul.Tensor, (x, x), 1),
        (aten.index_add.default, (x, 0, torch.arange(3), x[:3]), 2),
        (aten._embedding_bag_forward_only.default, (x, torch.arange(3), torch.arange(3)), 1),
        (aten.cat.default, ([x] * 128,), 1),
        (aten.cat.default, ([x] * 129,), 2),
        (aten._foreach_mul_.Scalar, ([x] * 111, 2.0), 2),  # 110 tensors a launch
        (aten._foreach_mul_.Scalar, ([torch.empty(65_536 * 320, device="meta")], 2.0), 1),
        (aten._foreach_mul_.Scalar, ([torch.empty(65_536 * 320 + 1, device="meta"), x], 2.0), 2),
        (aten.native_layer_norm_backward.default, (x, x), 2),
        (aten.native_layer_norm_backward.default, (x, torch.empty(70_000, 64, device="meta")), 4),
    )
    for func, args, count in cases:
        assert kernels_of(func, args) == count, func
    assert kernels_of(aten.linalg_inv_ex.default, (x,)) is None
