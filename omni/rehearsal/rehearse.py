"""A dry run: the engine itself, any rank of any world, on fake tensors of either device, in seconds on a CPU.

The rank that is built here is the one that training builds: modules at their real shapes, process groups,
optimizer, and the op list of a verified plan. Two things are not real. Tensors have shapes and no storage
(torch's FakeTensorMode), and process groups have members and no peers (torch's fake backend). So what a rank
of a cluster that nobody has would hold and send can be measured.

Invariant: nothing is replaced that decides a shape, but the choice of experts, which is even. What code is
replaced is in `stand_ins.py`.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from omni.config import ConfigError
from omni.models.regions import Named, all_parameters
from omni.planning.run_spec import RunSpec
from omni.rank.build import Rank, build_rank
from omni.rank.state import Piece, owned, read_state, snapshot, spread_weights
from omni.rank.step import execute, sum_step, update
from omni.rank.totals import StepSums
from omni.rehearsal.findings import Finding
from omni.rehearsal.footprint import Footprint
from omni.rehearsal.instruments import Instruments
from omni.rehearsal.launches import BEHIND, Launches
from omni.rehearsal.meetings import Call
from omni.rehearsal.meter import Meter
from omni.rehearsal.recorder import Recorder
from omni.rehearsal.stand_in_data import stand_in
from omni.rehearsal.stand_ins import even_routing, saving_all, stand_ins
from ops.one_copy import mapped
from parallel.groups import Groups
from parallel.megatron import ProcessGroupCollection, get_global_memory_buffer
from parallel.partitions import partition_of
from parallel.transports import node_map
from pipeline.anchor import StepInputs
from pipeline.engine import StepResult
from pipeline.plan import StepPlan
from pipeline.stopwatch import Stopwatch

_CPU = torch.device("cpu")
# Groups by what they carry. One that carries several things has the first of their names.
_CARRIERS = ("tp", "pool", "dp_cp", "partition", "domains", "ep", "expt_dp", "tp_dp_cp", "embd")


@dataclass(frozen=True)
class Rehearsal:
    """One rank's dry run of a step; `build_s` and `step_s` are seconds of CPU that it took.

    On device "cuda", `launches` tells by phase what a GPU would run, `findings` counts what costs one there;
    calls of operators that are `unknown` to `kernels.py` count as one launch each. `calls` are its
    collectives and messages in the order in which it issued them.
    """

    rank: int
    footprint: Footprint
    build_s: float
    step_s: float
    launches: Mapping[str, Launches] = field(default_factory=dict)
    findings: Mapping[Finding, int] = field(default_factory=dict)
    unknown: Mapping[str, int] = field(default_factory=dict)
    calls: Sequence[Call] = ()


def rehearse(spec: RunSpec, plan: StepPlan, rank: int, device: torch.device = _CPU) -> Rehearsal:
    """Run rank `rank` of `spec` through the plan of its domain. No process group may exist, and none is left.

    The step is not the first: the optimizer has its state. What the host reduces to learn losses and to agree
    on plans, less than a kilobyte, is left out of the bytes. On `device` "cuda", which the process must
    have been given (`noop_guard.py`), two steps run whole, and the rank copies what it saves and loads it.

    Raises:
        ConfigError: for a rank that there is not.
        DynamicShapeError: if a shape depends on numbers on the device.
    """
    start = time.process_time()
    with _built(spec, rank, device) as (own, seen):
        inputs = _assembled(spec, plan, own, seen)
        ranks = spec.arrangement.global_ranks(own.domain)
        routed_evenly = even_routing(plan.domain, ranks, spec.config.model.llm.moe, lambda: seen.meter.where)
        with seen.entered(), routed_evenly:
            own.optimizer.begin(plan.step)
            # On a CPU, what makes the optimizer's state is enough of a first step.
            first = StepResult(Stopwatch(device)) if seen.recorder is None else execute(own, plan, inputs)
            sums = _update(own, plan, first)
            classify(own, inputs, seen.meter)
            built = time.process_time()
            seen.start(group_labels(own.groups))
            _update(own, plan, execute(own, plan, inputs))
            own.note(f"step {plan.step}: {BEHIND}")
            sums.read()
            footprint, calls = _footprint(own, seen.meter), tuple(seen.meter.calls)
            if seen.recorder is not None:
                _checkpoint(own, seen)
    rehearsal = Rehearsal(rank, footprint, built - start, time.process_time() - built, calls=calls)
    if seen.recorder is None:
        return rehearsal
    recorder = seen.recorder
    return replace(
        rehearsal, launches=recorder.launches(), findings=recorder.findings, unknown=recorder.unknown
    )


def owned_parameters(spec: RunSpec, rank: int) -> dict[str, int]:
    """Count the parameters by component that `rank` holds and no rank before it: over all ranks, every
    parameter of the model once. The rank is built, and runs nothing.
    """
    counts = {}
    with _built(spec, rank, _CPU) as (own, _):
        for name, component in own.components.items():
            counts[name] = sum(
                named.elements[1]
                for named in all_parameters(component.modules, own.names[name])
                if not _is_copy(named, component.groups)
            )
    return counts


def owned_shards(spec: RunSpec, rank: int) -> dict[str, tuple[Piece, bool]]:
    """Say what `rank` owns of each parameter, by component and name, and whether a rank before it saves it.
    The rank is built, and runs nothing.
    """
    with _built(spec, rank, _CPU) as (own, _):
        return {
            f"{name}/{shard.name}": (
                Piece(shard.region, shard.start, shard.main.numel(), True),
                shard.copy != (0, 0),
            )
            for name, component in own.components.items()
            for shard in owned(component, own.names[name])
        }


def _is_copy(named: Named, groups: ProcessGroupCollection) -> bool:
    """Whether a rank before this one holds the same part of a parameter."""
    replicas = groups.expt_dp if named.expert is not None else groups.dp_cp
    if partition_of(named.parameter) is not None:
        replicas = groups.domains
    return bool(replicas.rank() > 0) or named.is_copy


@contextlib.contextmanager
def _built(spec: RunSpec, rank: int, device: torch.device) -> Iterator[tuple[Rank, Instruments]]:
    """Build a rank in a world of its own; the instruments are to be entered for what it then does."""
    if not 0 <= rank < spec.arrangement.world:
        raise ConfigError(f"rank {rank}: there are ranks 0 to {spec.arrangement.world - 1}")
    on_gpu = device.type == "cuda"
    nodes = node_map(range(spec.arrangement.world), spec.cluster.ranks_per_node)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    seen = Instruments(mode, Meter(nodes, device), Recorder() if on_gpu else None)
    with _world(rank, spec.arrangement.world), stand_ins(seen.meter, on_gpu):
        try:
            with seen.entered():
                own = build_rank(spec, rank, device, seen.note)
            if seen.recorder is not None:
                seen.recorder.order.labels = group_labels(own.groups)
            yield own, seen
        except Exception as error:
            error.add_note(f"in the rehearsal of rank {rank}, at {seen.meter.where}")
            raise


@contextlib.contextmanager
def _world(rank: int, size: int) -> Iterator[None]:
    """Be `rank` of `size` ranks, without the others."""
    assert not dist.is_initialized(), "a rehearsal makes a world of its own"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


# What the rank runs on, and how it is measured.


def _assembled(spec: RunSpec, plan: StepPlan, own: Rank, seen: Instruments) -> StepInputs:
    """The tensors of a step as training assembles them, on a thread beside the engine's; without content."""
    fetched = stand_in(own.assembler.fetch_of(plan.domain, spec.planner.metas_of(plan.domain)))

    def assemble() -> StepInputs:
        seen.at("assemble")
        with seen.entered():
            return own.assembler.assemble(plan.domain, fetched, predict=False)

    with ThreadPoolExecutor(1, "assembler") as thread:
        inputs = thread.submit(assemble).result()
    if seen.recorder is not None:  # the copy to the device has made fake ones
        return inputs
    faked: StepInputs = mapped(inputs, seen.mode.from_tensor)
    return faked


def _update(own: Rank, plan: StepPlan, result: StepResult) -> StepSums:
    sums = sum_step(own, plan, result)
    update(own, plan, sums)
    return sums


def _footprint(own: Rank, meter: Meter) -> Footprint:
    components = own.components.items()
    # Scratch memory is there throughout: a step finds what the one before it has left.
    scratch = sum(buffer.nbytes for buffer in get_global_memory_buffer().buffer.values())
    return Footprint(
        parameters={name: sum(p.numel() for p in component.parameters) for name, component in components},
        peak=meter.peak | {"buffers": meter.peak["buffers"] + scratch},
        at=str(meter.at),
        traffic={key: sent for key, sent in meter.traffic().items() if key[0] != "world"},
        encoding={op: most + scratch for op, most in meter.encoding.items()},
        host=meter.most_on_host,
    )


def _checkpoint(own: Rank, seen: Instruments) -> None:
    """Copy what a checkpoint of the rank would hold, read it on a thread beside the engine's, and load it."""

    def write() -> None:
        with seen.entered():
            shard.read()

    with saving_all():
        seen.at("checkpoint")
        shard = snapshot(own.components, own.names, own.stage)
        with ThreadPoolExecutor(1, "checkpoint") as thread:
            thread.submit(write).result()
        seen.at("restore")
        read_state([shard.held], _unwritten, own.components, own.names, own.stage, 0)
        spread_weights(own.components)


def _unwritten(rank: int, ranges: Sequence[tuple[str, int, int]]) -> Iterator[tuple[int, torch.Tensor]]:
    for number, (_, start, stop) in enumerate(ranges):
        yield number, torch.empty(stop - start, dtype=torch.uint8)


def classify(own: Rank, inputs: StepInputs, meter: Meter) -> None:
    """Tell the meter what the tensors are that exist before a step.

    fp32 weights are their own main weights.
    """
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped(inputs, note)
    meter.adopt(found, "buffers")
    for component in own.components.values():
        for shares in component.shares.values():
            meter.adopt(shares.tensors(), "optimizer")
        meter.adopt((vars(parameter)["main_grad"] for parameter in component.learning), "gradients")
        meter.adopt(component.parameters, "weights")


def group_labels(groups: Groups) -> dict[str, str]:
    """Name this rank's groups, such as "llm tp", by torch's names of them."""
    labels = {
        getattr(groups, name).group_name: name for name in ("world", "forward", "backward", "ship", "back")
    }
    for component, collection in groups.components.items():
        for carrier in _CARRIERS:
            group = getattr(collection, carrier, None)
            if isinstance(group, dist.ProcessGroup):
                labels.setdefault(group.group_name, f"{component} {carrier.replace('expt', 'expert')}")
    return labels
