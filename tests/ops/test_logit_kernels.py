"""Sums and gradients of logits against the equations in fp64: in torch, and as kernels that are interpreted.

Kernels are compiled for GPUs, too, of which none is needed.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ops.loss import logit_gradients, logit_sums

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

# Tokens, columns, the id of the first, how many are ids, and what logits are multiplied with. A kernel has
# 4,096 columns at once.
CASES = {
    "one block": (5, 37, 0, 37, 4.0),
    "some columns are padding": (5, 37, 74, 20, 4.0),
    "all columns are padding": (5, 37, 74, 0, 4.0),
    "one id": (5, 37, 74, 1, 4.0),
    "several blocks": (5, 9000, 9000, 9000, 4.0),
    "a block of padding": (5, 9000, 9000, 4096, 4.0),
    "huge logits": (5, 4100, 0, 4100, 1e4),
    "no tokens": (0, 37, 0, 37, 4.0),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
Sums = Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]
Gradients = Callable[..., torch.Tensor]


def logits_of(case: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, of which those of padding are the largest, and labels: the first id and the last, others
    before and behind, and a huge logit's.
    """
    tokens, columns, first, own, scale = CASES[case]
    generator = torch.Generator().manual_seed(len(case))
    logits = scale * torch.randn(tokens, columns, generator=generator, dtype=torch.float64)
    logits[:, own:] += 100 * scale
    likely = int(logits[-1, :own].argmax()) if tokens and own else 0
    labels = torch.tensor([first, first + own - 1, first - 1, first + own, first + likely])[:tokens]
    return logits.to(dtype), labels


def by_equations(
    logits: torch.Tensor, labels: torch.Tensor, first: int, own: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row the logarithm of the sum of exponentials and the label's logit; probabilities, and labels
    as ones.
    """
    exact, columns = logits.double(), torch.arange(logits.shape[1])
    ids = columns < own
    is_label = ids & (columns == labels[:, None] - first)
    logs = exact.masked_fill(~ids, -torch.inf).logsumexp(1)
    probabilities = torch.where(ids, (exact - logs[:, None]).exp(), 0)
    return logs, torch.where(is_label, exact, 0).sum(1), probabilities, is_label.double()


def check(case: str, dtype: torch.dtype, sums_of: Sums, gradients_of: Gradients, half: float) -> None:
    """Compare sums, and gradients from sums and losses' gradients, with the equations; what is rounded to
    bf16 may be off by `half`.
    """
    logits, labels = logits_of(case, dtype)
    _, _, first, own, _ = CASES[case]
    exact = torch.promote_types(dtype, torch.float32)
    precision = 1e-13 if exact == torch.float64 else 1e-6
    logs, targets, probabilities, is_label = by_equations(logits, labels, first, own)

    sums = sums_of(logits, labels, first, own)
    assert sums.dtype == exact
    assert sums.shape == (3, len(logits))
    largest, total, target = sums.double()
    if own:
        assert torch.equal(largest, logits[:, :own].double().amax(1))
    else:
        assert (largest == torch.finfo(exact).min).all()
    torch.testing.assert_close(total, (logs - largest).exp(), rtol=precision, atol=0)
    assert torch.equal(target, targets)

    # There is as much again elsewhere, so that probabilities are halves of those of the columns here.
    if own:
        sums[1] *= 2
    else:
        sums[:2] = 1
    grads = torch.linspace(-2, 2, len(logits), dtype=exact)
    found = gradients_of(grads, logits, labels, sums, first, own)
    assert found.dtype == dtype
    expected = grads.double()[:, None] * (probabilities / 2 - is_label)
    rounded = precision + (half if dtype == torch.bfloat16 else 0)
    torch.testing.assert_close(found.double(), expected, rtol=rounded, atol=precision / 100)
    assert not found[:, own:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_sums_and_gradients_are_those_of_the_equations(case: str, dtype: torch.dtype) -> None:
    check(case, dtype, logit_sums, logit_gradients, 2**-8)


def interpret() -> None:
    """Check kernels in a process that interprets them."""
    from ops.kernels import logits

    for case in CASES:
        for dtype in DTYPES[1:]:
            # The interpreter cuts off what a GPU rounds.
            check(case, dtype, logits.logit_sums, logits.logit_gradients, 2**-7)
    print("interpreted")


@needs_triton
def test_interpreted_kernels_give_what_the_equations_do() -> None:
    # A process of its own: what interprets kernels is chosen when triton is imported, for good.
    paths = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))
    done = subprocess.run(
        [sys.executable, "-c", "import test_logit_kernels as tests; tests.interpret()"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "interpreted\n", done.stderr


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_without_a_gpu(capability: int, tmp_path, monkeypatch) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ops.kernels.logits import _BLOCK, _WARPS, _backward_logits, _forward_sums

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"logits": "*bf16", "out": "*bf16", "labels": "*i64", "sums": "*fp32", "grads": "*fp32"}
    types |= dict.fromkeys(("tokens", "width", "first", "own"), "i32") | {"BLOCK": "constexpr"}
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": _WARPS}
    made = {}
    for kernel in (_forward_sums, _backward_logits):
        source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, {"BLOCK": _BLOCK})
        made[kernel] = triton.compile(source, target=target, options=options).asm
        assert made[kernel]["cubin"]
    assert "cvt.rn.bf16" in made[_backward_logits]["ptx"], "a gradient is rounded to the nearest"
