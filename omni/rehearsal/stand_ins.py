"""What a rehearsal replaces of the code that it runs.

That is what a fake world cannot answer; on device "cpu" attention in half precision and norms, whose kernels
for GPUs keep other bytes for their backward than torch's for CPUs; and which experts tokens go to.
What stands for torch.cuda itself is in `fake_cuda.py`.

Invariant: nothing is replaced that decides a shape, but the choice of experts, which depends on values. It is
even: each expert gets the same number of a rank's tokens, the first ones one more where they do not divide.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import unset_fake_temporarily

from omni.llm_sections import MoEConfig
from omni.models.dispatch import Dispatcher
from omni.models.llm_stage import LLMStage
from omni.models.towers.module import TowerModule
from omni.models.towers.probe import Prepared
from omni.rank import build, inputs, state
from omni.rank.totals import StepSums, StepTotals
from omni.rehearsal.meter import HOST, Meter
from omni.rehearsal.recorder import recorder_here
from ops import attention, on_host
from parallel.lane import Lane
from parallel.layout import split_evenly
from parallel.megatron import CudaRNGStatesTracker, get_global_memory_buffer
from pipeline.domain_plan import DomainPlan
from pipeline.ops import Op


@contextlib.contextmanager
def stand_ins(meter: Meter, on_gpu: bool) -> Iterator[None]:
    """Replace what a fake world cannot answer, and, unless `on_gpu`, what differs between a CPU and a GPU."""
    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, stand_in: Any) -> None:
            stack.enter_context(_replaced(owner, name, stand_in))

        # Random numbers need values.
        put(build, "model_parallel_cuda_manual_seed", lambda *args, **kwargs: None)
        put(CudaRNGStatesTracker, "fork", lambda *args: contextlib.nullcontext())
        # megatron's scratch memory is this rank's alone. The step before has left it: `_footprint` adds it.
        scratch = get_global_memory_buffer()
        get_scratch = scratch.get_tensor
        put(scratch, "buffer", {})
        put(scratch, "get_tensor", lambda *args: _uncounted(meter, get_scratch, args))
        # Memory of the host is not the device's, also where that is a CPU.
        host_buffer = on_host.host_buffer
        put(on_host, "host_buffer", lambda like: _made_as(meter, HOST, host_buffer, like))
        # An item's arrays are numpy's.
        silence = inputs._silence
        put(inputs, "_silence", lambda *args: _with_content(silence, args, {}))
        # What a tower computes of grids, which the plan says, and what it draws by values.
        arguments = Prepared.arguments
        put(Prepared, "arguments", lambda *args: _with_content(arguments, args, {}))
        put(TowerModule, "draw", lambda module, seed: module.drawn())
        if not on_gpu:
            # A shipment of two hops would run on a thread, which is outside the fake world.
            put(Lane, "run_long", lambda lane, job: job())
            # Totals are numbers, with which a fake GPU answers. Modules are born where they live.
            put(StepSums, "read", _made_up)
            put(torch.nn.Module, "to", lambda module, *args: module)
            # Kernels of a GPU.
            choose = attention._choose_backend
            put(attention, "_choose_backend", lambda *args: _gpu_backend(choose, args))
            put(F, "rms_norm", lambda x, shape, weight, eps: _RMSNorm.apply(x, weight))
            put(F, "layer_norm", lambda x, shape, weight, bias, eps: _LayerNorm.apply(x, weight, bias))
        # Python collects garbage at any time: without it, peaks are the same in every run.
        if gc.isenabled():
            stack.callback(gc.enable)
            gc.disable()
        yield


@contextlib.contextmanager
def even_routing(
    domain: DomainPlan, ranks: Sequence[int], moe: MoEConfig, where: Callable[[], str | Op]
) -> Iterator[None]:
    """Divide the tokens of every rank evenly over the experts: how many it has is the plan's.

    `ranks` are those of `domain` by domain rank, and `where` gives the op that runs, hence the microbatch.
    """

    def tokens(rank: int) -> int:
        op = where()
        assert isinstance(op, Op), f"experts at {op}"
        layout, cp_rank = domain.microbatches[op.index].layout, domain.cp_rank(ranks.index(rank))
        return layout.padded_tokens(cp_rank, domain.tp) // domain.tp

    def host_counts(dispatcher: Dispatcher) -> np.ndarray:
        """Wait for what was counted, which is fake."""
        assert dispatcher.arrived is not None
        assert dispatcher.order is not None
        arrived = dispatcher.arrived()
        if (recorder := recorder_here()) is not None:
            recorder.order.on_host(arrived, "numpy", writes=False)
        members = dist.get_process_group_ranks(dispatcher.group)
        counts = np.array([split_evenly(tokens(rank) * moe.topk, moe.experts) for rank in members])
        own = counts[dispatcher.group.rank()].sum()
        assert own == len(dispatcher.order.slots), "the plan and the router differ in tokens"
        return counts

    with _replaced(Dispatcher, "host_counts", host_counts):
        yield


@contextlib.contextmanager
def saving_all() -> Iterator[None]:
    """Let a rank save also what several ranks hold alike, so that it can load what it saves alone.

    The states of random numbers are left out: they are no fake tensors.
    """
    owned = state.owned
    with (
        _replaced(state, "owned", lambda *args: (replace(shard, copy=(0, 0)) for shard in owned(*args))),
        _replaced(state, "_rng_states", dict),
        _replaced(LLMStage, "buffers", LLMStage.biases),
    ):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    is_own, original = name in vars(owner), getattr(owner, name)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _made_up(sums: StepSums) -> StepTotals:
    return StepTotals((1.0,), (1.0,), (1.0,) * sums.components, 0.0, False)


def _uncounted(meter: Meter, get_scratch: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> torch.Tensor:
    with meter.not_counting():
        return get_scratch(*args)


def _made_as(
    meter: Meter, kind: str, make: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor
) -> torch.Tensor:
    with meter.making(kind):
        return make(like)


def _with_content(
    make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> Any:
    with unset_fake_temporarily():
        return make(*args, **(kwargs or {}))


def _gpu_backend(choose: Callable[..., str], args: tuple[Any, ...]) -> str:
    return "varlen" if args[-1] in (torch.bfloat16, torch.float16) else choose(*args)


class _RMSNorm(torch.autograd.Function):
    """What a GPU's kernel makes and keeps: its input, and one number a row in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _LayerNorm(torch.autograd.Function):
    """What a GPU's kernel makes and keeps: its input, and two numbers a row in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        mean, scale = (x.new_empty(*x.shape[:-1], 1, dtype=torch.float32) for _ in range(2))
        ctx.save_for_backward(x, weight, mean, scale)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, weight, _, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
