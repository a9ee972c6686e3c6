"""Build what one rank runs: process groups, its stage of the LLM, the encoders, optimizers and the engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from weakref import ref

import torch

from omni.config import ConfigError
from omni.models.initialise import initialise
from omni.models.llm import NAME as LLM
from omni.models.llm import attach_layer, staged
from omni.models.llm_stage import LLMStage
from omni.models.regions import Numbering, mark_parallel
from omni.planning.optim_schedule import stages_of
from omni.planning.run_spec import RunSpec
from omni.rank.anchors import EncoderAnchor
from omni.rank.inputs import Assembler, Place
from omni.rank.optimizer import ComponentOptimizer, JointOptimizer
from omni.rank.part_buckets import FRONT
from omni.rank.reduction import PartReduction
from omni.rank.state import Names
from ops.device import dtype_of
from parallel.copies import Copy
from parallel.groups import Groups, make_groups
from parallel.megatron import model_parallel_cuda_manual_seed
from parallel.waiting import waiting
from parallel.work import Weight
from pipeline.domain_plan import EMBEDDING
from pipeline.engine import Engine
from pipeline.ops import Op

Modules = Mapping[str, Mapping[int, torch.nn.Module]]
Told = Callable[[int, int], object]
"""Hears of a part, and of a layer of it."""
Follow = Callable[[Told], None]
"""Has it called where a pass comes to a layer."""


@dataclass(frozen=True)
class Rank:
    """Everything that lives on one rank of a run. `stage` is None on a rank that holds encoders only.

    `note` hears where the rank stands, for whoever watches it: every op before it runs, and words for what
    lies between.
    """

    rank: int
    domain: int
    domain_rank: int
    device: torch.device
    groups: Groups
    stage: LLMStage | None
    components: Mapping[str, ComponentOptimizer]
    names: Names
    optimizer: JointOptimizer
    anchors: Mapping[str, EncoderAnchor]
    engine: Engine
    assembler: Assembler
    note: Callable[[Op | str], None]

    @property
    def is_first(self) -> bool:
        """Whether this rank reports for the run."""
        return self.rank == 0

    def copies(self) -> list[Copy]:
        """Return what of this rank's weights other ranks hold, too, and the same to the bit."""
        copies = [copy for component in self.components.values() for copy in component.copies()]
        if self.stage is not None and (biases := self.stage.biases()):
            copies.append(Copy("biases of experts", list(biases.values()), self.stage.groups.tp_dp_cp))
        return copies

    def moments(self) -> list[torch.Tensor]:
        """Return what this rank's optimizers keep from update to update, and no other rank has: moments, and
        weights in fp32 where the model's own are of another type.
        """
        shares = (shares for component in self.components.values() for shares in component.shares.values())
        return [tensor for own in shares for tensor in own.kept() if tensor.numel()]


def _arrive(component: ComponentOptimizer, part: int, groups: Groups, layer: int = FRONT) -> bool:
    """Wait for the weights that a pass needs up to a layer, and return whether any were on their way."""
    with waiting(f"the weights of {component.name}", groups.world):
        return component.buckets[part].arrive(layer)


def _follow(follow: Follow, component: ComponentOptimizer, groups: Groups) -> None:
    """Have layers wait for their weights, if these ever change, and say when passes come to them and have
    left them.
    """
    if not any(own.buckets for own in component.buckets.values()):
        follow(lambda part, layer: None)
        return
    # Held by hooks, of layers and in graphs that live for long, neither would ever go.
    component_of, groups_of = ref(component), ref(groups)

    def came(part: int, layer: int) -> None:
        own, every = component_of(), groups_of()
        if own is not None and every is not None:
            _arrive(own, part, every, layer)

    follow(came)


def build_rank(spec: RunSpec, rank: int, device: torch.device, note: Callable[[Op | str], None]) -> Rank:
    """Build rank `rank` of `spec`. torch.distributed must be initialised; every rank calls it."""
    config, arrangement = spec.config, spec.arrangement
    dtype = dtype_of(config.train.precision)
    groups = make_groups(arrangement, staged(config.model.llm), timedelta(seconds=config.train.timeout_s))
    tp_rank, ep_rank = (own.tp.rank(), own.ep.rank()) if (own := groups.components.get(LLM)) else (0, 0)
    model_parallel_cuda_manual_seed(config.train.seed, tp_rank=tp_rank, ep_rank=ep_rank, etp_rank=0)
    stage = _build_stage(spec, groups, dtype, device) if LLM in groups.components else None
    modules, names = _build_modules(spec, stage, groups, dtype, device)
    layers = {name: _layers(spec, name, own, stage) for name, own in modules.items()}
    components = _build_optimizers(spec, modules, layers, groups)
    anchors = _build_anchors(spec, modules, groups)
    if stage is not None and spec.config.train.overlap_buckets:
        _follow(stage.follow, components[LLM], groups)
    for name, anchor in anchors.items():
        _follow(partial(anchor.follow, layers[name][0]), components[name], groups)
    parts = {
        (number, part): (components[name], part)
        for number, name in enumerate(spec.components)
        if name in components
        for part in modules[name]
    }
    domain = arrangement.domain(rank)
    ranks = arrangement.global_ranks(domain)
    domain_rank = ranks.index(rank)
    stages = stages_of(config.optim, config.stages, config.train.steps)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    return Rank(
        rank=rank,
        domain=domain,
        domain_rank=domain_rank,
        device=device,
        groups=groups,
        stage=stage,
        components=components,
        names=names,
        optimizer=JointOptimizer(spec.components, components, stages, device),
        anchors=anchors,
        engine=Engine(
            domain_rank=domain_rank,
            ranks=ranks,
            stage=stage,
            width=config.model.llm.hidden,
            dtype=dtype,
            anchors=anchors,
            groups=groups,
            device=device,
            reductions={at: PartReduction(*of, groups) for at, of in parts.items()},
            arrivals={at: partial(_arrive, *of, groups) for at, of in parts.items()},
            timeout_s=config.train.timeout_s,
            on_op=note,
        ),
        assembler=Assembler(
            llm=config.model.llm,
            encoders=spec.encoders,
            sources=spec.sources,
            place=Place(domain_rank, device, dtype, stream),
        ),
        note=note,
    )


def _build_stage(spec: RunSpec, groups: Groups, dtype: torch.dtype, device: torch.device) -> LLMStage:
    return LLMStage(
        spec.config.model.llm,
        spec.arrangement.llm,
        vocab_size=spec.tokenizer.vocab_size,
        num_sources=len(spec.sources),
        dtype=dtype,
        device=device,
        groups=groups.components[LLM],
        attach_layers=[
            attach_layer(name)
            for encoder in spec.encoders.values()
            for name in encoder.attach
            if name != EMBEDDING.name
        ],
    )


def _build_anchors(spec: RunSpec, modules: Modules, groups: Groups) -> dict[str, EncoderAnchor]:
    return {
        name: EncoderAnchor(name, modules[name][0], groups.components[name].tp, len(encoder.attach))
        for name, encoder in spec.encoders.items()
        if name in modules
    }


def _build_modules(
    spec: RunSpec, stage: LLMStage | None, groups: Groups, dtype: torch.dtype, device: torch.device
) -> tuple[Modules, Names]:
    """Build the encoders of this rank and draw all weights. Return its modules, and how their weights are
    numbered: by component and by number of the part; encoders are of one part.
    """
    llm = spec.config.model.llm
    modules: dict[str, dict[int, torch.nn.Module]] = {}
    names: dict[str, dict[int, Numbering]] = {}
    if stage is not None:
        modules[LLM] = {number: own.model for number, own in stage.virtual_stages.items()}
        names[LLM] = {number: own.numbering for number, own in stage.virtual_stages.items()}
    for name, encoder in spec.encoders.items():
        if name in groups.components:
            own = groups.components[name]
            module = encoder.build(llm.hidden, dtype, device, own)
            check_state(name, module)
            check_weights(name, module, spec.work[name].weights())
            mark_parallel(module)
            modules[name] = {0: module}
            names[name] = {0: Numbering(tp_rank=own.tp.rank(), tp_size=own.tp.size())}
    for name, parts in modules.items():
        for part, module in parts.items():
            depth = llm.layers if name == LLM else getattr(module.config, "num_layers", 1)
            seed, numbering = spec.config.train.seed, names[name][part]
            initialise(module, seed=seed, component=name, num_layers=depth, numbering=numbering)
    return modules, names


def check_state(name: str, module: torch.nn.Module) -> None:
    """Refuse an encoder's module that keeps tensors beside its weights, such as the averages of a BatchNorm.

    Raises:
        ConfigError: with the first of their names.
    """
    weights = dict(module.named_parameters(remove_duplicate=False))
    saved = {of: own for of, own in module.state_dict().items() if isinstance(own, torch.Tensor)}
    if beside := [of for of in saved if of not in weights]:
        raise ConfigError(
            f"model.encoders.{name}: its module {type(module).__name__} keeps {', '.join(beside[:3])} beside "
            "its weights, which ranks do not share and checkpoints do not hold. Register what never changes "
            "with persistent=False, and make what learns a parameter; of a BatchNorm make a norm of each "
            "token (docs/encoders.md)"
        )


def check_weights(name: str, module: torch.nn.Module, stated: Sequence[Weight]) -> None:
    """Refuse an encoder's statement of work that does not have the weights of its module on this rank, or not
    those that are frozen for good: plans, memory and communication are read off it.

    Raises:
        ConfigError: with both numbers, and the first weight that differs.
    """
    _check_frozen(name, module, stated)
    sizes = {of: parameter.numel() for of, parameter in module.named_parameters()}
    elements = [weight.elements for weight in stated]
    if sum(sizes.values()) == sum(elements):
        return
    at = next((n for n, size in enumerate(sizes.values()) if elements[n : n + 1] != [size]), len(sizes))
    weight, size = [*sizes.items(), ("none that the module has", 0)][at]
    said = f"{elements[at]:,}" if at < len(elements) else "nothing"
    raise ConfigError(
        f"model.encoders.{name}: work() states {sum(elements):,} elements of weights on this rank, and its "
        f"module {type(module).__name__} has {sum(sizes.values()):,}. In the module's order the first that "
        f"differs is number {at}, {weight}: {said} stated, {size:,} built. Mend weights() of its blocks "
        f"(docs/encoders.md)"
    )


def _check_frozen(name: str, module: torch.nn.Module, stated: Sequence[Weight]) -> None:
    still = {of: own.numel() for of, own in module.named_parameters() if not own.requires_grad}
    said = sum(weight.elements for weight in stated if weight.frozen)
    if sum(still.values()) != said:
        raise ConfigError(
            f"model.encoders.{name}: work() states {said:,} elements of weights on this rank as frozen, and "
            f"of its module {type(module).__name__} {sum(still.values()):,} do not learn (requires_grad): "
            f"{', '.join([*still][:3]) or 'none'}. State these by Weight(elements, frozen=True) in weights() "
            f"of its blocks (docs/encoders.md), or freeze the component by optim.components.{name}.frozen"
        )


def _layers(
    spec: RunSpec, name: str, modules: Mapping[int, torch.nn.Module], stage: LLMStage | None
) -> dict[int, Sequence[torch.nn.Module]]:
    """Return the layers of each part of a component that passes are followed through: none of an encoder that
    does not state that its weights arrive by layer, and none at all if buckets are not to overlap.

    Raises:
        ConfigError: if the module of one that does has not said which they are.
    """
    if not spec.config.train.overlap_buckets:
        return dict.fromkeys(modules, ())
    if name == LLM and stage is not None:
        return {number: own.model.decoder.layers for number, own in stage.virtual_stages.items()}
    if not spec.work[name].by_layer:
        return {0: ()}
    followed: Sequence[torch.nn.Module] | None = getattr(modules[0], "followed_layers", None)
    if followed is None:
        raise ConfigError(
            f"model.encoders.{name}: work() states by_layer=True, and its module {type(modules[0]).__name__} "
            "has no followed_layers. Give it these, or state by_layer=False (docs/encoders.md)"
        )
    return {0: followed}


def _build_optimizers(
    spec: RunSpec,
    modules: Modules,
    layers: Mapping[str, Mapping[int, Sequence[torch.nn.Module]]],
    groups: Groups,
) -> dict[str, ComponentOptimizer]:
    """Build those of this rank's components."""
    config = spec.config
    sent = dtype_of(config.train.mixed_precision_reduce)
    return {
        name: ComponentOptimizer(
            name, modules[name], groups.components[name], config.optim, layers[name], sent
        )
        for name in spec.components
        if name in modules
    }
