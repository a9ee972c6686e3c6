"""Kernels compiled for the GPUs they are taken on, of which this needs none: what launches would compile."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel_calls import compiled, process_with

pytest.importorskip("triton", reason="Triton is not installed")

OTHERS = [pytest.param(capability, marks=pytest.mark.slow) for capability in (80, 100)]
CAPABILITIES = pytest.mark.parametrize("capability", [90, *OTHERS])
KINDS = ["silu", "gelu", "gelu_tanh", "quick_gelu"]
TOKENS = 64


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    cache = tmp_path_factory.mktemp("triton")  # what another run compiled is not looked up
    with process_with({"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}) as call:
        yield call


def check(kernels: list[Any], names: list[str], capability: int) -> None:
    """Assert that the kernels are those, and that all their numbers stay in registers."""
    assert [kernel.name for kernel in kernels] == names
    for kernel in kernels:
        assert f".target sm_{capability}" in kernel.asm["ptx"]
        assert len(kernel.asm["cubin"]) > 0
        instructions = kernel.asm["sass"]
        assert "EXIT" in instructions
        spilled = re.findall(r"\b(?:STL|LDL)\b", instructions)
        assert not spilled, f"{kernel.name} stores or loads {len(spilled)} times what registers do not hold"


def check_norms(capability: int, dtype: torch.dtype, width: int) -> None:
    from ops.kernels import norms

    x, weight = torch.empty(TOKENS, width, dtype=dtype), torch.empty(width, dtype=dtype)
    mean = torch.empty(TOKENS)
    with compiled(capability) as kernels:
        norms.norm(x, weight, None, 1e-5, 0.0)
        norms.add_norm(x, x, weight, weight, weight, 1e-5, 1.0)
        norms.norm_add(x, x, weight, None, 1e-5, 1.0)
        norms.norm_backward(x, x, x, mean, mean, weight, 1.0, [torch.empty(width)] * 3)
        norms.norm_backward(x, x, x, mean[:0], mean, weight, 0.0, [weight])
        norms.norm_backward(x, None, x, mean[:0], mean, weight, 0.0, [weight])
    check(kernels, ["_forward"] * 3 + ["_backward", "_add_columns"] * 3, capability)


def check_heads(capability: int, keys: int, group: int, size: int, half: int) -> None:
    from ops.kernels import gates, heads

    joined = torch.empty(TOKENS, keys, 2 * group + 2, size, dtype=torch.bfloat16)
    query, gate, key, value = joined.split([group, group, 1, 1], dim=2)
    query, key, value, weight = query, key.squeeze(2), value.squeeze(2), joined[0, 0, 0]
    angles = [torch.empty(TOKENS, 1, half, dtype=torch.bfloat16)] * 2
    with compiled(capability) as kernels:
        for parameters in ([], [weight] * 2, [weight] * 4):
            q, k = heads.heads(query, key, angles, parameters, 1e-5, 0.0, 1)
            given = (q, k, value, gate, query, key) if parameters else (q, k, value, None, None, None)
            totals = [torch.empty(size)] * len(parameters)
            heads.heads_backward(*given, angles, parameters, 1e-5, 0.0, totals)
        out = q.flatten(1)
        gates.let_through(out, gate)
        gates.let_through_backward(out, out, gate)
    normed = ["_heads", "_backward", "_add_columns"] * 2
    check(kernels, ["_heads", "_backward", *normed, "_let_through", "_let_through"], capability)
    for kernel in (kernel for kernel in kernels if kernel.name != "_add_columns"):  # sums are few
        loads = re.findall(r"ld\.global[\w.:]*", kernel.asm["ptx"])
        assert loads
        single = [load for load in loads if not re.search(r"\.v[24]", load)]
        assert len(single) <= 8, "heads loaded number by number, as only weights may be"


def check_sum_and_gates(capability: int, kinds: list[str]) -> None:
    from ops.kernels import gates, sums

    stream, x = torch.empty(TOKENS, 4096, dtype=torch.bfloat16), torch.empty(2, 28672, dtype=torch.bfloat16)
    with compiled(capability) as kernels:
        sums.summed(stream, stream, stream[0])
        for kind in kinds:
            product = gates.gated(x, kind, 7.0, 1.0)
            gates.gated_backward(product, x, kind, 7.0, 1.0)
    check(kernels, ["_add", *(["_forward", "_backward"] * len(kinds))], capability)


def check_biased(capability: int, kinds: list[str], width: int) -> None:
    from ops.kernels import gates

    x = torch.empty(TOKENS, width, dtype=torch.bfloat16)
    with compiled(capability) as kernels:
        for kind in kinds:
            gates.biased(x, x[0], kind)
            gates.biased_backward(x, x, x[0], kind, torch.empty(width))
    check(kernels, ["_biased", "_biased_backward", "_add_columns"] * len(kinds), capability)


def check_adamw(capability: int) -> None:
    from ops.adamw import STEPS
    from ops.kernels import adamw

    main, moment = torch.empty(100_000), torch.empty(100_000, dtype=torch.bfloat16)
    runs, table = torch.empty(7, 2, dtype=torch.int64), torch.empty(7)
    with compiled(capability) as kernels:
        for exp_avg, model in ((main, None), (moment, moment)):
            tensors = main, main, exp_avg, exp_avg, model, runs[:, 1], table, table, table[0], table[0]
            adamw.adamw(*tensors, 1e-3, 0.9, 0.95, 1e-8, STEPS)
    check(kernels, ["_update"] * 2, capability)
    for kernel in kernels:
        wide = re.findall(r"(?:ld|st)\.global[\w.:]*\.v4", kernel.asm["ptx"])
        assert len(wide) >= 6, "a gradient, a weight and moments are read and written four numbers at once"


# The widest rows are those that registers hold with the least room.
@pytest.mark.parametrize(
    ("capability", "width"),
    [
        (90, 8192),
        *(pytest.param(*of, marks=pytest.mark.slow) for of in ((90, 4096), (80, 8192), (100, 8192))),
    ],
)
def test_norms(compiling: Callable[..., Any], capability: int, width: int) -> None:
    compiling(check_norms, capability, torch.bfloat16, width)


def test_norms_in_single_precision(compiling: Callable[..., Any]) -> None:
    compiling(check_norms, 90, torch.float32, 1152)


# One size is no power of two.
@CAPABILITIES
@pytest.mark.parametrize(
    "sizes",
    [pytest.param((8, 4, 128, 64), id="128", marks=pytest.mark.slow), pytest.param((16, 1, 72, 36), id="72")],
)
def test_heads(compiling: Callable[..., Any], capability: int, sizes: tuple[int, ...]) -> None:
    compiling(check_heads, capability, *sizes)


@CAPABILITIES
def test_adamw(compiling: Callable[..., Any], capability: int) -> None:
    compiling(check_adamw, capability)


@CAPABILITIES
def test_sums_and_gates(compiling: Callable[..., Any], capability: int) -> None:
    compiling(check_sum_and_gates, capability, KINDS if capability == 90 else ["silu"])


@CAPABILITIES
def test_activations_of_sums(compiling: Callable[..., Any], capability: int) -> None:
    compiling(check_biased, capability, KINDS if capability == 90 else ["gelu"], 4304)
