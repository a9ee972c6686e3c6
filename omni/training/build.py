"""Build what one rank runs: process groups, its stage of the LLM, the encoders, optimizers and the engine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch

from omni.models.initialise import initialise
from omni.models.llm import NAME as LLM
from omni.models.llm import LLMStage
from omni.training.anchors import EncoderAnchor
from omni.training.inputs import Assembler, Place
from omni.training.job import Job
from omni.training.optimizer import ComponentOptimizer, JointOptimizer
from omni.training.state import Names
from ops.device import dtype_of
from parallel.groups import Groups, make_groups
from parallel.layout import Layout
from parallel.megatron import model_parallel_cuda_manual_seed
from parallel.waiting import waiting
from pipeline.engine import Engine
from pipeline.plan import Op


@dataclass(frozen=True)
class Rank:
    """Everything that lives on one rank of a run."""

    rank: int
    replica: int
    device: torch.device
    groups: Groups
    stage: LLMStage
    components: Mapping[str, ComponentOptimizer]
    names: Names
    optimizer: JointOptimizer
    engine: Engine
    assembler: Assembler

    @property
    def is_first(self) -> bool:
        """Whether this rank reports for the run."""
        return self.rank == 0


def _reduce(component: ComponentOptimizer, groups: Groups) -> None:
    with waiting(f"the gradients of {component.name}", groups.world):
        component.reduce()


def build_rank(job: Job, rank: int, device: torch.device, on_op: Callable[[Op], None]) -> Rank:
    """Build rank `rank` of `job`. torch.distributed must be initialised; every rank calls it."""
    config, layout = job.config, job.layout
    dtype = dtype_of(config.train.precision)
    layouts = {LLM: layout, **{name: Layout(dp=layout.world) for name in job.encoders}}
    groups = make_groups(layouts, LLM, timedelta(seconds=config.train.timeout_s))
    model_parallel_cuda_manual_seed(config.train.seed, tp_rank=0, ep_rank=0, etp_rank=0)

    llm = config.model.llm
    stage = LLMStage(
        llm,
        vocab_size=job.tokenizer.vocab_size,
        num_sources=len(job.sources),
        dtype=dtype,
        device=device,
        groups=groups.components[LLM],
    )
    seed = config.train.seed
    initialise(
        stage.model,
        seed=seed,
        component=LLM,
        num_layers=llm.layers,
        first_layer=stage.first_layer,
        tied=llm.tied,
    )
    modules: dict[str, torch.nn.Module] = {LLM: stage.model}
    for name, encoder in job.encoders.items():
        modules[name] = encoder.build(llm.hidden, dtype, device, groups.components[name])
        depth = getattr(modules[name].config, "num_layers", 1)
        initialise(modules[name], seed=seed, component=name, num_layers=depth)

    components = {
        name: ComponentOptimizer(name, module, groups.components[name], config.optim)
        for name, module in modules.items()
    }
    replica = layout.replica(rank)
    ranks = layout.replica_ranks(replica)
    position = ranks.index(rank)
    return Rank(
        rank=rank,
        replica=replica,
        device=device,
        groups=groups,
        stage=stage,
        components=components,
        names={name: (stage.first_layer, llm.tied) if name == LLM else (0, False) for name in components},
        optimizer=JointOptimizer(components, config.optim, config.train.steps, device),
        engine=Engine(
            position=position,
            ranks=ranks,
            stage=stage,
            anchors={name: EncoderAnchor(modules[name]) for name in job.encoders},
            groups=groups,
            device=device,
            reducers=[partial(_reduce, components[name], groups) for name in job.components],
            timeout_s=config.train.timeout_s,
            on_op=on_op,
        ),
        assembler=Assembler(
            llm=llm,
            encoders=job.encoders,
            sources=job.sources,
            place=Place(position, layout.pp, device, dtype),
        ),
    )
