"""Operators on this machine's device against their definitions in fp64, tiles of shared sequences included.

    python benchmarks/gpu_kernels.py [--out FOLDER] [--quick]

Inputs are bf16, as in training. Attention: heads of 64 to 128, and 72 and 20, which kernels lack or fill up;
causal and not, windows, grouped queries, and rows that are a part of their context. What is between the
products of a layer, and AdamW, run by kernels in Triton where there are any, in fp64 by torch. Each row is
the largest relative error ‖a − b‖ / ‖b‖ of the output and of the gradients, and what is allowed. Long
attention, products, operators of a layer and AdamW are timed, too, 20 times after 5, the median. Small shapes
with --quick. The last line is JSON; the exit code is 1 where an error is beyond what is allowed. figures.json
of FOLDER has each row as soon as it is known.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from infra.run_folder import write_json
from ops.adamw import adamw
from ops.attention import make_tile_packing, packed_attention
from ops.device import select_device
from ops.gates import FUNCTIONS, biased, gated, let_through
from ops.grouped import grouped_inputs, grouped_linear, grouped_weights
from ops.heads import made_heads, rotated
from ops.kernels.choice import without_kernels
from ops.linear import add_weight_gradient
from ops.loss import logit_gradients, logit_sums
from ops.norm import Norm, with_bias
from ops.one_copy import brought
from ops.rotary import rotary_table
from ops.routing import expert_numbers, order_rows, rows_of
from ops.span import Span

BF16 = torch.bfloat16
ROUNDED = 2e-2  # several roundings of bf16, one after the other
SUMMED = 1e-5  # sums in fp32 of what bf16 holds exactly
TIMES, WARMUP = 20, 5
NORM = {"sequence_parallel": False}
Row = dict[str, Any]


def relative(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """The largest relative error; a tensor that is nearly zero is measured by the largest one."""
    largest = max(float(b.norm()) for b in exact)
    errors = [
        float((a.double() - b).norm()) / max(float(b.norm()), 1e-3 * largest, 1e-30)
        for a, b in zip(found, exact, strict=True)
    ]
    return math.inf if any(math.isnan(error) for error in errors) else max(errors)


def with_gradients(
    function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """A function's output, and the gradients of its inputs under one random weight of each element."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def attention_by_definition(
    spans: Sequence[Span], causal: bool, window: int | None
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Attention tile by tile: a row sees itself, under `causal` nothing after it, nothing beyond `window`."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        repeat, out, row, at = query.shape[1] // key.shape[1], [], 0, 0
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        for span in spans:
            rows, keys = slice(row, row + span.rows), slice(at, at + span.context)
            scores = torch.einsum("qnh,knh->nqk", query[rows], key[keys]) / math.sqrt(query.shape[2])
            place = torch.arange(span.rows, device=query.device)[:, None] + span.offset
            behind = place - torch.arange(span.context, device=query.device)
            hidden = (behind < 0) & causal
            if window is not None:
                hidden |= behind.abs() > window
            scores = scores.masked_fill(hidden, -math.inf)
            out.append(torch.einsum("nqk,knh->qnh", scores.softmax(-1), value[keys]))
            row, at = row + span.rows, at + span.context
        return torch.cat(out)

    return attend


def attention_rows(device: torch.device, unit: int) -> Iterator[Row]:
    """Whole sequences and tiles, by head size, mask and window."""
    whole = [Span(n, n, 0) for n in (4 * unit, 1, 2 * unit + 3, 17)]
    tiles = [Span(unit, unit, 0), Span(3, unit + 3, unit), Span(unit + 5, 3 * unit + 5, 2 * unit)]
    open_tiles = [Span(unit, 3 * unit, unit), Span(5, unit, 0)]
    cases = [
        (name, spans, causal, window, size, heads)
        for size in (64, 72, 80, 128, 20)
        for heads in ((8, 8), (8, 2))
        for name, spans, causal, window in (
            ("whole, causal", whole, True, None),
            ("whole", whole, False, None),
            ("whole, causal, window", whole, True, unit // 2),
            ("tiles, causal", tiles, True, None),
            ("tiles, causal, window", tiles, True, 3 * unit),
            ("tiles", open_tiles, False, None),
        )
    ]
    for name, spans, causal, window, size, (heads, groups) in cases:
        packing = brought(make_tile_packing(spans, causal, heads * size, device, BF16, window), device)
        context = sum(span.context for span in spans)
        shapes = ((packing.tokens, heads, size), (context, groups, size), (context, groups, size))
        inputs = [torch.randn(shape, device=device, dtype=BF16) for shape in shapes]
        found = with_gradients(lambda q, k, v, packing=packing: packed_attention(q, k, v, packing), inputs)
        exact = with_gradients(attention_by_definition(spans, causal, window), [x.double() for x in inputs])
        yield {
            "what": f"attention, {name}",
            "shape": f"{heads} heads of {size}, {groups} of keys",
            "by": packing.backend,
            "error": relative(found, exact),
            "allowed": ROUNDED,
        }


def other_rows(device: torch.device, unit: int) -> Iterator[Row]:
    """Weight gradients, losses, rotation, norms, the order of experts and their products."""

    def draw(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def row(what: str, shape: str, found: Sequence[torch.Tensor], exact: Any, allowed: float) -> Row:
        return {"what": what, "shape": shape, "error": relative(found, exact), "allowed": allowed}

    for tokens in (0, 1, 8 * unit):
        inputs, grads, total = draw(tokens, 512), draw(tokens, 384), draw(384, 512, dtype=torch.float32)
        exact = total.double() + grads.double().T @ inputs.double()
        add_weight_gradient(inputs, grads, total)
        allowed = SUMMED if device.type == "cuda" else ROUNDED  # a CPU rounds the product before it is added
        yield row("weight gradient, added in fp32", f"{tokens} tokens, 512 to 384", [total], [exact], allowed)

    logits, labels = draw(unit, 32_000), torch.randint(0, 32_000, (unit,), device=device)
    weight = draw(unit, dtype=torch.float32)

    def losses(x: torch.Tensor) -> list[torch.Tensor]:
        sums = logit_sums(x, labels, 0, x.shape[1])
        largest, total, target = sums
        gradient = logit_gradients(weight.to(sums), x, labels, sums, 0, x.shape[1])
        return [largest - target + total.log(), gradient]

    found, exact = losses(logits), losses(logits.double())
    yield row("losses of tokens", f"{unit} of 32,000", found[:1], exact[:1], SUMMED)
    yield row("losses of tokens, gradient", f"{unit} of 32,000", found[1:], exact[1:], ROUNDED)

    x, places = draw(unit, 8, 128), torch.arange(unit, device=device) * 7
    found = with_gradients(lambda x: rotated(x, x, rotary_table(places, 128, 5e5, BF16))[0], [x])
    exact = with_gradients(
        lambda x: rotated(x, x, rotary_table(places, 128, 5e5, torch.float64))[0], [x.double()]
    )
    yield row("rotary embedding", f"{unit} tokens, 8 heads of 128", found, exact, ROUNDED)

    for normalization in ("RMSNorm", "LayerNorm"):
        config = argparse.Namespace(normalization=normalization, params_dtype=BF16, sequence_parallel=False)
        norm = Norm(config, 1024).to(device)
        exactly = Norm(argparse.Namespace(**{**vars(config), "params_dtype": torch.float64}), 1024).to(device)
        x = draw(unit, 1024)
        found, exact = with_gradients(norm, [x]), with_gradients(exactly, [x.double()])
        yield row(normalization, f"{unit} tokens of 1024", found, exact, ROUNDED)

    routing = torch.rand(unit, 16, device=device).argsort(1).argsort(1) < 2
    tokens = draw(unit, 256)
    order = order_rows(routing.nonzero()[:, 1].view(unit, 2), expert_numbers(16).to(device))
    rows, of = rows_of(tokens, order), order.tokens
    expected = torch.cat([tokens[routing[:, expert]] for expert in range(16)])
    assert len(of) == 2 * unit
    yield row("tokens in the order of experts", f"{unit} tokens, 2 of 16", [rows], [expected.double()], 0.0)

    ends = torch.tensor([0, unit, unit, unit + 3], dtype=torch.int32, device=device)  # two without rows
    rows, grads, weight = draw(unit + 3, 256), draw(unit + 3, 384), draw(4, 384, 256)
    for product, factors in (
        (grouped_linear, (rows, weight)),
        (grouped_inputs, (grads, weight)),
        (grouped_weights, (rows, grads)),
    ):
        found, exact = product(*factors, ends), product(*(x.double() for x in factors), ends)
        yield row(product.__name__, f"{unit + 3} rows, 4 of 256 to 384", [found], [exact], ROUNDED)


def heads_by(
    tables: Mapping[torch.dtype, Any], gated: bool, heads: torch.Tensor, *weights: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """What attention takes in, normed by weights and rotated by a table, where there are any."""
    norms: Any = tuple(
        argparse.Namespace(parameters=lambda own=own: [own], eps=1e-5, offset=0.0) for own in weights
    )
    return made_heads(heads, tables.get(heads.dtype), norms or None, gated)


def layer_rows(device: torch.device, unit: int) -> Iterator[Row]:
    """The operators of a layer between its products, by the kernels that this device runs."""
    by = "torch" if device.type == "cpu" or without_kernels() else "triton"

    def row(what: str, shape: str, function: Callable[..., Any], *shapes: tuple[int, ...]) -> Row:
        def joined(*inputs: torch.Tensor) -> torch.Tensor:
            out = function(*inputs)
            parts = out if isinstance(out, tuple) else (out,)
            return torch.cat([x.flatten() for x in parts if x is not None])

        inputs = [torch.randn(shape, device=device, dtype=BF16) for shape in shapes]
        found, exact = with_gradients(joined, inputs), with_gradients(joined, [x.double() for x in inputs])
        error = relative(found, exact)
        return {"what": what, "shape": shape, "by": by, "error": error, "allowed": ROUNDED}

    for tokens in (1, unit + 3):
        for kind in FUNCTIONS:
            for clamp, offset in ((None, 0.0), (1.0, 1.0)):
                gate = partial(gated, kind=kind, clamp=clamp, offset=offset)
                yield row(f"gate, {kind}, {clamp}, {offset}", f"{tokens} of 1400", gate, (tokens, 2800))
            act, wide = partial(biased, kind=kind), (tokens, 4304)
            yield row(f"activation of a sum, {kind}", f"{tokens} of 4304", act, wide, (4304,))
        for size, kv_heads, groups in ((128, 2, 4), (72, 4, 1), (20, 1, 3)):
            table = {
                dtype: rotary_table(torch.arange(tokens, device=device) * 7, size, 5e5, dtype)
                for dtype in (BF16, torch.float64)
            }
            heads = (tokens, kv_heads, groups + 2, size), (tokens, kv_heads, 2 * groups + 2, size)
            shape = f"{tokens} tokens, {kv_heads} · {groups} heads of {size}"
            for what, tables, joined, weights in (
                ("rotation of heads", table, heads[0], []),
                ("rotation of normed heads", table, heads[0], [(size,)] * 2),
                ("rotation of normed heads with gates", table, heads[1], [(size,)] * 2),
                ("norms of heads", {}, heads[0], [(size,)] * 2),
            ):
                yield row(what, shape, partial(heads_by, tables, joined is heads[1]), joined, *weights)
            through = (tokens, kv_heads * groups * size)
            yield row("gates of heads", shape, let_through, through, (tokens, kv_heads, groups, size))
        for width, normalization in ((4096, "RMSNorm"), (1152, "LayerNorm")):
            norms = {
                dtype: Norm(
                    argparse.Namespace(**NORM, normalization=normalization, params_dtype=dtype), width
                )
                .to(device)
                .requires_grad_(False)
                for dtype in (BF16, torch.float64)
            }
            stream = (tokens, width)
            enter = partial(lambda norms, x: norms[x.dtype].enter(x), norms)
            enter_sum = partial(lambda norms, x, y, b: norms[x.dtype].enter_sum(x, y, b), norms)
            leave = partial(lambda norms, x, y: norms[x.dtype].leave(x, y, None), norms)
            shape = f"{tokens} tokens of {width}"
            yield row(normalization, shape, enter, stream)
            yield row(f"{normalization} of a sum", shape, enter_sum, stream, stream, (width,))
            yield row(f"{normalization} behind a half", shape, leave, stream, stream)
            yield row("sum with a bias", shape, with_bias, stream, stream, (width,))


def updated(device: torch.device, numbers: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[Any]]:
    """Tensors of a shard of two parameters, of which the second decays, with moments of a type: weights,
    gradients, moments, weights in bf16; and what else an update takes.
    """
    main, grad, exp_avg, exp_avg_sq = torch.randn(4, numbers, device=device)
    tensors = [main, grad, exp_avg.to(dtype), exp_avg_sq.square().to(dtype), main.bfloat16()]
    runs = torch.tensor([[0, numbers // 3], [numbers // 3, numbers]], device=device)
    decays, counts = torch.tensor([0.0, 0.1], device=device), torch.full((2,), 3.0, device=device)
    ones = torch.ones(2, device=device)
    return tensors, [runs, decays, counts, ones[0], ones[1], 1e-2, 0.9, 0.999, 1e-8]


def update_rows(device: torch.device, numbers: int) -> Iterator[Row]:
    """An update with moments of either type, its weights and its moments."""
    for dtype in (torch.float32, BF16):
        tensors, given = updated(device, numbers, dtype)
        weight, grad, first, second = (x.double() for x in tensors[:4])
        decay = torch.where(torch.arange(numbers, device=device) < numbers // 3, 0.0, 0.1)
        first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
        step = first / (1 - 0.9**3) / ((second / (1 - 0.999**3)).sqrt() + 1e-8)
        exact = weight * (1 - 1e-2 * decay) - 1e-2 * step
        adamw(*tensors, *given)
        for what, found, of, allowed in (
            ("weights", tensors[:1], [exact], SUMMED),
            ("weights in bf16", tensors[4:], [exact], ROUNDED),
            ("moments", tensors[2:4], [first, second], ROUNDED if dtype is BF16 else SUMMED),
        ):
            error = relative(found, of)
            shape = f"{numbers} numbers, moments in {dtype}"
            yield {"what": f"AdamW, {what}", "shape": shape, "error": error, "allowed": allowed}


def update_times(device: torch.device, numbers: int) -> Iterator[Row]:
    """Bytes a second that an update moves."""
    for dtype in (torch.float32, BF16):
        tensors, given = updated(device, numbers, dtype)
        seconds = took(device, lambda tensors=tensors, given=given: adamw(*tensors, *given))
        moved = numbers * (3 * 4 + 4 * dtype.itemsize + BF16.itemsize)
        shape = f"{numbers} numbers, moments in {dtype}"
        yield {"what": "AdamW", "shape": shape, "ms": seconds * 1e3, "GB/s": moved / seconds / 1e9}


def moved_rows(device: torch.device, tokens: int) -> Iterator[Row]:
    """Bytes a second that operators of a layer of an 8B move, forward and backward."""
    table = rotary_table(torch.arange(tokens, device=device), 128, 5e5, BF16)
    norm = Norm(argparse.Namespace(**NORM, normalization="RMSNorm", params_dtype=BF16), 4096).to(device)
    turn = partial(heads_by, {BF16: table}, False)
    cases: tuple[tuple[str, Callable[..., Any], tuple[tuple[int, ...], ...], int], ...] = (
        ("gate", partial(gated, kind="silu"), ((tokens, 2 * 14336),), 8 * 14336),
        ("rotation of heads", turn, ((tokens, 8, 6, 128),), 2 * 2 * 48 * 128),
        ("rotation of normed heads", turn, ((tokens, 8, 6, 128), (128,), (128,)), 5 * 48 * 128),
        ("gates of heads", let_through, ((tokens, 4096), (tokens, 8, 4, 128)), 8 * 4096),
        ("RMSNorm of a sum", lambda x, y: norm.enter_sum(x, y, None), ((tokens, 4096),) * 2, 8 * 4096),
        ("RMSNorm behind a half", lambda x, y: norm.leave(x, y, None), ((tokens, 4096),) * 2, 6 * 4096),
    )
    for what, function, shapes, numbers in cases:
        leaves = [torch.randn(shape, device=device, dtype=BF16).requires_grad_() for shape in shapes]
        out = function(*leaves)
        out = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
        grads = [torch.randn_like(x) for x in out]

        def both(function: Any = function, leaves: Any = leaves, grads: Any = grads) -> None:
            out = function(*leaves)
            torch.autograd.grad(out[: len(grads)] if isinstance(out, tuple) else (out,), leaves, grads)

        seconds = took(device, both)
        moved = numbers * tokens * BF16.itemsize
        yield {
            "what": f"{what}, both ways",
            "shape": f"{tokens} tokens",
            "ms": seconds * 1e3,
            "GB/s": moved / seconds / 1e9,
        }


def timed_rows(device: torch.device, unit: int) -> Iterator[Row]:
    """What long attention and a large product reach, forward alone and with the backward."""
    tokens, heads, groups, size = 32 * unit, 32, 8, 128
    packing = brought(make_tile_packing([Span(tokens, tokens, 0)], True, heads * size, device, BF16), device)
    shapes = ((tokens, heads, size), (tokens, groups, size), (tokens, groups, size))
    inputs = [torch.randn(shape, device=device, dtype=BF16) for shape in shapes]
    flops = 2 * tokens * tokens * heads * size  # two products, half of the pairs
    with torch.no_grad():
        seconds = took(device, lambda: packed_attention(*inputs, packing))
    shape = f"{tokens} tokens, 32 heads of 128, 8 of keys"
    yield {"what": "long attention, forward", "shape": shape, **rate(seconds, flops)}
    leaves = [x.requires_grad_() for x in inputs]
    out_grad = torch.randn_like(inputs[0])
    seconds = took(device, lambda: torch.autograd.grad(packed_attention(*leaves, packing), leaves, out_grad))
    yield {"what": "long attention, forward and backward", "shape": shape, **rate(seconds, 3.5 * flops)}
    n = 32 * unit
    a, b = torch.randn(2, n, n, device=device, dtype=BF16)
    total = torch.zeros(n, n, device=device)
    yield {"what": "product", "shape": f"{n} × {n}", **rate(took(device, lambda: a @ b), 2 * n**3)}
    seconds = took(device, lambda: add_weight_gradient(a, b, total))
    yield {"what": "weight gradient, added in fp32", "shape": f"{n} × {n}", **rate(seconds, 2 * n**3)}


def took(device: torch.device, function: Callable[[], object]) -> float:
    """Median seconds of a call that the device has finished."""
    seconds = []
    for _ in range(WARMUP + TIMES):
        begin = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return median(seconds[WARMUP:])


def rate(seconds: float, flops: float) -> Row:
    return {"ms": seconds * 1e3, "TFLOP/s": flops / seconds / 1e12}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a folder for figures.json")
    parser.add_argument("--quick", action="store_true", help="small shapes")
    arguments = parser.parse_args()
    device, unit = select_device(), 64 if arguments.quick else 512
    torch.manual_seed(0)
    found: dict[str, Any] = {"checked": [], "timed": [], "missed": []}
    sources = (
        ("checked", attention_rows(device, min(unit, 256))),
        ("checked", other_rows(device, unit)),
        ("checked", layer_rows(device, unit)),
        ("checked", update_rows(device, 100 * unit + 1)),
        ("timed", moved_rows(device, 32 * unit if device.type == "cuda" else 8)),
        ("timed", update_times(device, 100_000 * unit if device.type == "cuda" else 1000)),
        ("timed", timed_rows(device, min(unit, 256) if device.type == "cuda" else 8)),
    )
    for key, rows in sources:
        for row in rows:
            found[key].append(row)
            if row.get("error", 0.0) > row.get("allowed", 0.0):
                found["missed"].append(f"{row['what']}, {row['shape']}")
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            if arguments.out:
                write_json(arguments.out / "figures.json", found)
    worst = max((row["error"] for row in found["checked"]), default=math.inf)
    print(json.dumps({"checked": len(found["checked"]), "worst": worst, "missed": found["missed"]}))
    return int(bool(found["missed"]))


if __name__ == "__main__":
    raise SystemExit(main())
