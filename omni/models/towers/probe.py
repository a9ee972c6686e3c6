"""A tower tried out on tensors without storage: what it puts out, takes, and computes from grids.

Towers that compute from a grid do so in functions of `transformers.vision_utils`, whose results they take
as arguments, too. Which functions a tower calls, and with what, is noted here once; the same functions are
then called on the host when items are packed, so that nothing waits for a device in a pass.
"""

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from omni.models.towers.attention import attend_by, prepare
from omni.models.towers.folder import Tower, state_beside_weights

_RESULTS = {
    "get_vision_cu_seqlens": ("cu_seqlens",),
    "get_vision_attention_seqlens": ("cu_seqlens", "max_seqlen"),
    "get_vision_position_ids": ("position_ids",),
    "get_vision_window_index": ("window_index", "cu_window_seqlens"),
    "get_vision_interpolation_indices_and_weights": ("interp_indices", "interp_weights"),
    "get_vision_bilinear_indices_and_weights": ("bilinear_indices", "bilinear_weights"),
    "get_vision_nearest_position_ids": ("position_ids",),
}
"""Functions of transformers from grids to arguments of a tower, with the names of these."""
_LONGEST = "get_max_seqlen"


@dataclass(frozen=True)
class Prepared:
    """Functions from grids [items, 3] to arguments, by their names, and the names of what is the length of
    the longest sequence.
    """

    functions: tuple[tuple[tuple[str, ...], Callable[[torch.Tensor], Any]], ...] = ()
    longest: tuple[str, ...] = ()

    def arguments(
        self, grids: Sequence[Sequence[int]]
    ) -> tuple[dict[str, torch.Tensor], dict[str, tuple[int, ...]]]:
        """Compute on the host: tensors by name, and lengths of sequences by the name of their boundaries."""
        theirs = torch.tensor(grids)
        tensors: dict[str, torch.Tensor] = {}
        for names, function in self.functions:
            found = function(theirs)
            tensors |= zip(names, found if len(names) > 1 else (found,), strict=True)
        lengths = {
            name: tuple(b - a for a, b in pairwise(tensors.pop(name).tolist()))
            for name in [*tensors]
            if name.startswith("cu_")
        }
        return {name: own for name, own in tensors.items() if name not in self.longest}, lengths


@dataclass
class Trial:
    """A pass of a tower: what came out and what it took, in FLOPs outside attention and bytes. `attended`
    are the lengths within which each layer attends, `heads` those of its attention, and their size. `shifts`
    are biases that are added to all keys of a layer alike.

    Beside what is `kept` for it, a `forward` and a `backward` need so many bytes at most; `passing` are those
    of a forward that keeps nothing.
    """

    out: Any = None
    flops: int = 0
    moved: int = 0
    kept: int = 0
    forward: int = 0
    backward: int = 0
    passing: int = 0
    attended: list[tuple[int, ...]] = field(default_factory=list)
    heads: tuple[int, int] = (0, 0)
    shifts: list[torch.Tensor] = field(default_factory=list)
    prepared: Prepared = Prepared()


def on_meta(tower: Tower, dtype: torch.dtype) -> torch.nn.Module:
    """Build a tower without storage.

    Raises:
        ConfigError: for one that keeps state beside its weights.
    """
    with torch.device("meta"):
        made = tower.build(dtype, draw=False)
    prepare(made)
    if beside := state_beside_weights(made):
        raise tower.refused(
            f"it keeps {', '.join(beside[:3])} beside its weights, which is neither saved nor divided"
        )
    return made


def try_out(
    tower: Tower, made: torch.nn.Module, call: Callable[[Any], Any], inputs: Sequence[torch.Tensor]
) -> Trial:
    """Run `call` of a tower that was made by `on_meta`, which hands it `inputs`.

    Raises:
        ConfigError: for a tower that does not run so, or attends by itself.
    """
    tried = Trial()
    attend_by(made, _NotedAttention(tried))
    known = {own.untyped_storage()._cdata for own in (*made.parameters(), *made.buffers(), *inputs)}
    meter, kept = _Traffic(tried), dict[int, int]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    module = import_module(tower.kind.__module__)
    try:
        with ExitStack() as stack:
            noted = stack.enter_context(_noting(module, tried))
            with (
                FlopCounterMode(display=False) as counter,
                meter,
                torch.autograd.graph.saved_tensors_hooks(keep, lambda own: own),
            ):
                tried.out = call(made)
            tried.flops, tried.kept = counter.get_total_flops(), sum(kept.values())
            tried.forward = max(0, meter.most - tried.kept)
            tried.backward = _backward(made, tried.out)
            attend_by(made, _NotedAttention(Trial()))
            with torch.no_grad(), _Traffic(Trial()) as meter:
                call(made)
            tried.passing = meter.most
    except Exception as error:  # classes of others may raise anything
        first = (str(error).splitlines() or [""])[0]
        raise tower.refused(
            f"it does not run on what its processor makes and what is known of items before "
            f"({type(error).__name__}: {first})"
        ) from error
    if len(tried.attended) != tower.layers:
        raise tower.refused(
            f"{len(tried.attended)} of its {tower.layers} layers attend by the interface of transformers"
        )
    tried.prepared = noted()
    return tried


def _backward(made: torch.nn.Module, out: torch.Tensor) -> int:
    """Run the backward of what came `out`. Return the bytes that it needs at most beside what was kept: of
    each weight the gradient is let go of when it is there, as if it were added to others.
    """
    hooks = [
        own.register_post_accumulate_grad_hook(lambda own: setattr(own, "grad", None))
        for own in made.parameters()
        if own.requires_grad
    ]
    gradient, meter = torch.empty_like(out), _Traffic(Trial())
    try:
        with meter:
            out.backward(gradient)
    finally:
        for hook in hooks:
            hook.remove()
    return meter.most


class _Traffic(TorchDispatchMode):
    """Counts the bytes that ops read and write, views aside, and what they have made that is still there."""

    def __init__(self, tried: Trial) -> None:
        super().__init__()
        self.tried = tried
        self.live = self.most = 0
        self.held: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [own for own in tree_leaves((args, kwargs)) if isinstance(own, torch.Tensor)]
        there = {own.untyped_storage()._cdata for own in read}
        made = [own for own in tree_leaves(out) if isinstance(own, torch.Tensor)]
        fresh = [own for own in made if own.untyped_storage()._cdata not in there]
        if fresh:
            self.tried.moved += sum(own.nbytes for own in (*fresh, *read))
        for own in fresh:
            self._hold(own.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.held:
            self.held[key] = weakref.ref(storage, lambda _: self._forget(key, size))
            self.live += size
            self.most = max(self.most, self.live)

    def _forget(self, key: int, size: int) -> None:
        del self.held[key]
        self.live -= size


class _NotedAttention:
    """Stands in for attention: notes who attends to whom, and keeps what a kernel keeps."""

    def __init__(self, tried: Trial) -> None:
        self.tried = tried

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, batch: int, ends: Any
    ) -> torch.Tensor:
        lengths = vars(ends)["lengths"] if ends is not None else (q.shape[0] // batch,) * batch
        self.tried.attended.append(lengths)
        self.tried.heads = q.shape[1], q.shape[2]
        if (bias := _shift(k)) is not None:
            self.tried.shifts.append(bias)
        out: torch.Tensor = _Kept.apply(q, k, v)
        return out


_AS_IT_IS = ("View", "UnsafeView", "Transpose", "Permute", "ReshapeAlias", "Clone")


def _shift(keys: torch.Tensor) -> torch.Tensor | None:
    """The bias of the linear that keys come from, if nothing but their order has changed since."""
    node: Any = keys.grad_fn
    while node is not None and node.name().removesuffix("Backward0") in _AS_IT_IS:
        node = node.next_functions[0][0]
    if node is None or not node.name().startswith("Addmm"):
        return None
    leaves = (getattr(of, "variable", None) for of, _ in node.next_functions)
    return next((own for own in leaves if own is not None and own.dim() == 1), None)


class _Kept(torch.autograd.Function):
    """Keeps queries, keys, values, the output and a sum for each head and row."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@contextmanager
def _noting(module: Any, tried: Trial) -> Iterator[Callable[[], Prepared]]:
    """Note which functions from grids a file of transformers calls meanwhile, with what, and answer them with
    tensors without storage.
    """
    functions: dict[tuple[str, ...], Callable[[torch.Tensor], Any]] = {}
    longest: dict[str, None] = {}

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def answer(grids: Any, *args: Any, kwargs: Any = None, **more: Any) -> Any:
            bound = inspect.signature(original).bind(None, *args, **more)
            given: Mapping[str, Any] = dict([*bound.arguments.items()][1:])
            names = _RESULTS[name]

            def again(own: torch.Tensor) -> Any:
                return original(own, **given)

            functions[names] = again
            longest.update({own: None for own in names if own.startswith("max_")})
            with torch.device("cpu"), _off():
                found = again(torch.tensor(grids))
            parts = found if len(names) > 1 else (found,)
            answers = [_without_storage(part) for part in parts]
            return tuple(answers) if len(names) > 1 else answers[0]

        return answer

    def length(*args: Any, kwargs: Any = None, kwarg_name: str = "max_seqlen") -> int:
        longest[kwarg_name] = None
        return 1

    with ExitStack() as stack:
        for name in _RESULTS:
            if name in vars(module):
                stack.enter_context(patch.object(module, name, noted(name, vars(module)[name])))
        if _LONGEST in vars(module):
            stack.enter_context(patch.object(module, _LONGEST, length))
        yield lambda: Prepared(tuple(functions.items()), tuple(longest))


@contextmanager
def _off() -> Iterator[None]:
    """Let what runs inside go uncounted: it runs on the host."""
    with torch.utils._python_dispatch._disable_current_modes():
        yield


def _without_storage(value: Any) -> Any:
    """A tensor as one on meta, which remembers the lengths between its numbers if these are boundaries."""
    if not isinstance(value, torch.Tensor):
        return value
    with _off():
        answer = value.to("meta")
        if value.dtype == torch.int32 and value.dim() == 1:
            vars(answer)["lengths"] = tuple(b - a for a, b in pairwise(value.tolist()))
    return answer
