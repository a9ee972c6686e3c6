"""From a configuration and its data to a run, before any rank exists.

`prepare_run` is where a user's mistakes are found: unknown encoders, sizes that do not fit, layouts that do
not divide the world, datasets that are missing or cut short. What a key may be by itself has been checked
when the configuration was composed (`omni.keys`). Each function below is given its own section.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dataloader.global_batch import Budget
from dataloader.tokenizer import Tokenizer
from dataloader.tokens import SampleMeta
from omni.config import Config, ConfigError, ModelConfig
from omni.data_config import DataConfig
from omni.llm_config import LLMConfig
from omni.models.llm import NAME as LLM
from omni.models.llm import attach_points, check_llm_adapters, virtual_stage_layers
from omni.models.registry import Encoder, make_encoder
from omni.planning.allocation import allocated
from omni.planning.choice import (
    BESIDE,
    DOMAIN,
    LONGEST,
    PLACEMENT,
    Keys,
    RunChoice,
    Tried,
    chosen,
    reopened,
    unchosen,
    with_keys,
)
from omni.planning.choices import Chosen, chosen_policies, with_pairing
from omni.planning.choose import choose
from omni.planning.clusters import cluster_of
from omni.planning.domain_planner import DomainPlanner, TransportChoice
from omni.planning.frameworks import Framework
from omni.planning.fullest import beyond, remembering
from omni.planning.group_planner import GroupPlanner
from omni.planning.host_memory import check_host_link, check_kept
from omni.planning.layouts import check_layout, check_pools, check_vpp, resolve_layout
from omni.planning.mixture import Mixture, with_positions
from omni.planning.optim_schedule import check_stages, first_steps, frozen_at, stages_of
from omni.planning.planner import Planner
from omni.planning.pools import check_long_samples, sharing_of
from omni.planning.run_data import RunData, open_data, tokenizer_of
from omni.planning.run_spec import RunSpec, check_layouts, layouts_of
from omni.planning.sharing import Sharing
from omni.planning.work import collective_group_size, cost_table, part_work
from omni.planning.workload import Workload
from omni.planning.world_planner import WorldPlanner
from ops.device import dtype_of
from parallel.costs import CostTable
from parallel.layout import Arrangement
from parallel.placements import COLOCATED
from pipeline.domain_plan import EMBEDDING, Point

GROUP_REPLICAS, GROUP_RANKS = 16, 256  # 256 GPUs are often behind one switch


def prepare_run(
    config: Config,
    world: int,
    trace: Sequence[SampleMeta] = (),
    framework: Framework | None = None,
    begin: tuple[int, int] | None = None,
    opened: RunData | None = None,
) -> RunSpec:
    """Check a configuration against its data and `world` ranks, and resolve it. Steps take the samples of a
    `trace` over and over, if there is one, and last as another `framework` would have them, to be simulated.
    The data are opened for it, or were `opened` for another run with the same data and encoders.
    What the configuration leaves open is chosen for steps from that and the position in the stream at which
    they `begin`, and what was chosen for other ranks is chosen again. From there on steps are gone through,
    too, to find where later phases of the mixture begin, if that is not known.

    Raises:
        ConfigError, LayoutError, PolicyError, DataError: ValueErrors with key, value and remedy.
    """
    begin = begin or (1, config.start.cursor or 0)
    config = with_pairing(reopened(config, world))
    encoders, plain = make_encoders(config.model.encoders), unchosen(config)
    arrangement = resolve_layout(plain.layout, plain.placement, tuple(encoders), world)
    policies = chosen_policies(plain.policies)
    check_vpp(plain.layout.llm, config.launch.layouts, policies["pipeline"])
    check_pools(None if DOMAIN in config.choice.keys else plain.layout.domain, config.launch.layouts)
    stages = stages_of(config.optim, config.stages, config.train.steps)
    check_stages(stages, (LLM, *encoders))
    check_llm_adapters(config.model.llm)
    check_host_link(config.model, config.cluster)
    check_kept(config.model, config.cluster, config.train.precision)
    _check_adapters_learn(config.model, first_steps(stages, (LLM, *encoders)))
    tokenizer = tokenizer_of(config.data)
    data = opened or open_data(config.data, config.train.seed, encoders, tokenizer, trace)
    check_layouts(encoders, tokenizer.vocab_size, data.mixture.samples_at(begin[1]), begin[1])

    def resolve(config: Config, ranks: int = world) -> RunSpec:
        own = config.model.encoders  # of which keys may be chosen that change nothing of their rows
        made = encoders if own == plain.model.encoders else make_encoders(own)
        return _resolve(config, ranks, made, tokenizer, data, framework)

    alone = with_keys(plain, {PLACEMENT: COLOCATED.name, BESIDE: None, DOMAIN: None})
    encoder_tp, cursor = arrangement.encoder_tp, begin[1]
    beside = allocated(plain.placement, plain.layout, world, encoder_tp, partial(resolve, alone), cursor)
    spec = choose(with_keys(config, beside), world, data.mixture.samples_at(cursor), resolve, begin)
    return _located(_settled(spec, beside, world), data.mixture, begin)


def _settled(spec: RunSpec, keys: Keys, world: int) -> RunSpec:
    """Return a run that remembers and tells keys that were settled for so many ranks before all others."""
    if not keys:
        return spec
    choice = spec.choice or RunChoice({}, Tried({}), (), again=spec.config.choice.ranks)
    every = {**keys, **choice.keys}
    return replace(spec, config=chosen(spec.config, every, world), choice=replace(choice, keys=every))


def _located(spec: RunSpec, mixture: Mixture, begin: tuple[int, int]) -> RunSpec:
    """Find where phases of a run begin that steps reach, from the step and the position where steps `begin`,
    and note it in its configuration.
    """
    config = spec.config
    world = mixture.located(spec.planner.world, *begin, config.train.steps)
    if len(world.later) == len(spec.planner.world.later):
        return spec
    data = with_positions(config.data, {phase.first: phase.start for phase in world.later})
    return replace(spec, config=replace(config, data=data), planner=replace(spec.planner, world=world))


def _resolve(
    config: Config,
    world: int,
    encoders: dict[str, Encoder],
    tokenizer: Tokenizer,
    opened: RunData,
    framework: Framework | None,
) -> RunSpec:
    """Resolve a configuration of which nothing is open."""
    llm, layout, data = config.model.llm, config.layout, config.data
    arrangement = resolve_layout(layout, config.placement, tuple(encoders), world)
    policies = chosen_policies(config.policies)
    check_layout(llm, encoders, arrangement, config.launch.layouts, tokenizer.vocab_size)
    budget = _budget(data, policies, arrangement, was_chosen=LONGEST in config.choice.keys)
    element = dtype_of(config.train.precision).itemsize
    cluster, under = cluster_of(config.cluster, config.train.precision), None
    if framework is not None:
        cluster = framework.on(cluster, arrangement.llm.cp)
        under = framework, data.pass_tokens // arrangement.llm.cp
    work = part_work(llm, encoders, tokenizer.vocab_size, arrangement, element)
    stages = stages_of(config.optim, config.stages, config.train.steps)
    sent = dtype_of(config.train.mixed_precision_reduce).itemsize
    moments = first_steps(stages, (LLM, *encoders)), dtype_of(config.optim.moments_dtype).itemsize
    workload = Workload(arrangement, encoders, work, cluster, llm.hidden * element, element, sent, *moments)
    overlaps = config.train.overlap_buckets
    table = cost_table(work, encoders, arrangement, cluster, workload.row_bytes, under, sent, overlaps)
    share = partial(sharing_of, llm, data.pass_tokens, policies, encoders, arrangement, cluster, element)
    domain = _domain_planner(
        workload,
        policies,
        table,
        sharing=share(table),
        feeds=_feeds(llm, encoders, arrangement, tokenizer.vocab_size),
        microbatch_tokens=data.pass_tokens,
        encoder_bytes=config.pipeline.encoder_bytes,
        rounds=config.pipeline.rounds,
        guarded=cluster.memory_bytes is not None,
        **_of_packs(llm, data, config.packing.divisor or 1),
        layout_of=layouts_of(encoders, tokenizer.vocab_size),
    )
    group_size = config.balance.group or _group_size(arrangement)
    remembered = remembering(workload)
    planner = Planner(
        world=_world(opened.mixture, budget, policies, arrangement, group_size),
        group=GroupPlanner(policies["balance"], arrangement.replicas),
        domain=domain,
        frozen=partial(frozen_at, stages),
        share=share,
        beyond=partial(beyond, remembered, table),
    )
    return RunSpec(
        **vars(workload),
        config=config,
        policies=policies,
        tokenizer=tokenizer,
        indexes=opened.indexes,
        heldout=opened.heldout,
        planner=planner,
        table=table,
    )


def _of_packs(llm: LLMConfig, data: DataConfig, divisor: int) -> dict[str, Any]:
    """How much smaller packs are than passes may be; up to how many tokens passes keep more than inputs."""
    kept = 0 if llm.recompute == "full" else None
    return {
        "pack_divisor": divisor,
        "kept_tokens": data.pass_tokens // divisor if llm.recompute_long else kept,
    }


def _check_adapters_learn(model: ModelConfig, learns: Collection[str]) -> None:
    """Refuse adapters of a component that is frozen in every step.

    Raises:
        ConfigError: naming both keys.
    """
    ranks = {LLM: ("model.llm.lora.rank", model.llm.lora.rank)}
    for name, options in model.encoders.items():
        ranks[name] = f"model.encoders.{name}.lora.rank", (options.get("lora") or {}).get("rank", 0)
    for name, (key, rank) in ranks.items():
        if rank and name not in learns:
            raise ConfigError(
                f"{key}={rank}, but optim.components.{name}.frozen freezes adapters, too, in every step. "
                f"What they belong to is frozen without it: leave frozen out, in stages as well, or lora"
            )


def make_encoders(options: Mapping[str, Mapping[str, Any]]) -> dict[str, Encoder]:
    """Make the encoders of `model.encoders`, of which each takes items of another modality.

    Raises:
        ConfigError: naming the encoder.
    """
    if LLM in options:
        raise ConfigError(f"model.encoders.{LLM}: this name is the LLM's; choose another")
    made: dict[str, Encoder] = {}
    for name, own in options.items():
        encoder = make_encoder(name, own)
        for other, before in made.items():
            if before.modality == encoder.modality:
                raise ConfigError(
                    f"model.encoders.{name} and model.encoders.{other} both take {encoder.modality} items: "
                    "keep one"
                )
        made[name] = encoder
    return made


def _domain_planner(
    workload: Workload, policies: Chosen, table: CostTable, sharing: Mapping[str, Sharing], **more: Any
) -> DomainPlanner:
    """The planner of a domain's level."""
    arrangement, encoders, cluster = workload.arrangement, workload.encoders, workload.cluster
    llm = [part for name, part in workload.work.items() if name not in encoders]
    return DomainPlanner(
        encoders={encoder.modality: name for name, encoder in encoders.items()},
        components=(LLM, *encoders),
        arrangement=arrangement,
        llm=LLM,
        sharing=sharing,
        transport=TransportChoice(
            policies["boundary"], cluster.ranks_per_node, table.row_bytes, cluster.links
        ),
        packing=policies["packing"],
        pairing=policies["pairing"],
        schedule=policies["pipeline"],
        table=table,
        collective_group=collective_group_size(llm, arrangement, sharing[LLM].pool.num_cp_ranks),
        single_queue=arrangement.domain_size > 1 and cluster.queues == "one",
        **more,
    )


def _world(
    mixture: Mixture, budget: Budget, policies: Chosen, arrangement: Arrangement, group_size: int
) -> WorldPlanner:
    """The planner of the world's level, with the phases whose positions are known."""
    return WorldPlanner(
        mixture.samples, budget, policies["deal"], arrangement.num_domains, group_size, mixture.begun()
    )


def _feeds(
    llm: LLMConfig, encoders: Mapping[str, Encoder], arrangement: Arrangement, vocab_size: int
) -> tuple[tuple[str, tuple[Point, ...]], ...]:
    """The attach points of the encoders whose rows enter elsewhere than at the embedding alone."""
    layers_of = virtual_stage_layers(llm, vocab_size, arrangement.llm)
    points = attach_points([name for encoder in encoders.values() for name in encoder.attach], layers_of)
    return tuple(
        (name, tuple(points[p] for p in encoder.attach))
        for name, encoder in encoders.items()
        if encoder.attach != (EMBEDDING.name,)
    )


def _group_size(arrangement: Arrangement) -> int:
    """Domains among which samples are reordered where nobody says: as many as hold GROUP_REPLICAS replicas,
    of small ones as many as hold GROUP_RANKS ranks.
    """
    return max(1, GROUP_REPLICAS // arrangement.replicas, GROUP_RANKS // arrangement.domain_size)


def _budget(data: DataConfig, policies: Chosen, arrangement: Arrangement, was_chosen: bool) -> Budget:
    if (data.step_tokens is None) == (data.step_samples is None):
        raise ConfigError(
            f"data.step_tokens={data.step_tokens}, data.step_samples={data.step_samples}: set exactly one"
        )
    check_long_samples(data, policies["llm_sp"], arrangement, was_chosen)
    return Budget(data.pass_tokens, data.step_tokens, data.step_samples, data.on_long, data.sample_tokens)
