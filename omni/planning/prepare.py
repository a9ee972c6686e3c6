"""From a configuration and its data to a run, before any rank exists.

`prepare_run` is where a user's mistakes are found: unknown encoders, sizes that do not fit, layouts that do
not divide the world, datasets that are missing or cut short.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from dataloader.format import DataError
from dataloader.global_batch import Budget
from dataloader.index import Index
from dataloader.item_counts import RememberedCounts
from dataloader.samples import Samples, in_order
from dataloader.stream import SourceSpec, Stream
from dataloader.tokenizer import Tokenizer, get_tokenizer
from dataloader.tokens import SampleMeta
from omni.config import Config, ConfigError, HeldoutConfig, SourceConfig
from omni.models.llm import NAME as LLM
from omni.models.llm import (
    attach_points,
    llm_parts,
)
from omni.models.registry import Encoder, make_encoder
from omni.planning.choices import Chosen, chosen_policies
from omni.planning.clusters import cluster_of
from omni.planning.domain_planner import DomainPlanner, TransportChoice
from omni.planning.frameworks import Framework
from omni.planning.fullest import fits
from omni.planning.group_planner import GroupPlanner
from omni.planning.layouts import check_layout, check_parts, resolve_layout
from omni.planning.optim_schedule import check_optim, frozen_components
from omni.planning.planner import Planner
from omni.planning.pools import check_long_samples, sharing_of
from omni.planning.run_spec import RunSpec, item_count
from omni.planning.work import cost_table, part_work, party_size
from omni.planning.workload import Workload
from omni.planning.world_planner import WorldPlanner
from ops.device import dtype_of
from parallel.cluster import Cluster
from parallel.costs import CostTable
from parallel.layout import Arrangement
from pipeline.domain_plan import EMBEDDING, Point

GROUP_REPLICAS, GROUP_RANKS = 16, 256  # 256 GPUs are often behind one switch
_SOUGHT = (
    " (relative, so looked for in {}: start where the run was first started, or give the whole path, if it "
    "is elsewhere)"
)


def prepare_run(
    config: Config, world: int, trace: Sequence[SampleMeta] = (), framework: Framework | None = None
) -> RunSpec:
    """Check a configuration against its data and `world` ranks, and resolve it. Steps take the samples of a
    `trace` over and over, if there is one, and last as another `framework` would have them, to be simulated.

    Raises:
        ConfigError, LayoutError, PolicyError, DataError: ValueErrors with key, value and remedy.
    """
    encoders = _make_encoders(config)
    by_modality = _by_modality(encoders)
    arrangement = resolve_layout(config, world)
    policies = chosen_policies(config)
    check_parts(config, policies["pipeline"])
    check_optim(config.optim, (LLM, *encoders), config.train.steps)
    tokenizer = tokenizer_of(config)
    indexes, heldout, samples = _open(config, encoders, tokenizer, by_modality, trace)
    check_layout(config, encoders, arrangement, tokenizer.vocab_size)
    element = dtype_of(config.train.precision).itemsize
    work = part_work(config, encoders, tokenizer.vocab_size, arrangement, element)
    cluster = _cluster(config, arrangement, framework)
    table = cost_table(config, work, encoders, arrangement, cluster, element, framework)
    workload = Workload(arrangement, encoders, work, cluster, config.model.llm.hidden * element, element)
    planner = _planner(config, policies, workload, by_modality, samples, table, tokenizer.vocab_size)
    return RunSpec(
        **vars(workload),
        config=config,
        policies=policies,
        tokenizer=tokenizer,
        indexes=indexes,
        heldout=heldout,
        planner=planner,
        table=table,
    )


def _planner(
    config: Config,
    policies: Chosen,
    workload: Workload,
    by_modality: Mapping[str, str],
    samples: Samples,
    table: CostTable,
    vocab_size: int,
) -> Planner:
    """The planner of each level."""
    arrangement, encoders, cluster = workload.arrangement, workload.encoders, workload.cluster
    share = partial(sharing_of, config, policies, encoders, arrangement, cluster, workload.element)
    sharing = share(table)
    llm = [part for name, part in workload.work.items() if name not in encoders]
    domain = DomainPlanner(
        encoders=by_modality,
        components=(LLM, *encoders),
        arrangement=arrangement,
        llm=LLM,
        sharing=sharing,
        feeds=_feeds(config, encoders, arrangement, vocab_size),
        transport=TransportChoice(
            policies["boundary"], cluster.ranks_per_node, table.row_bytes, cluster.links
        ),
        packing=policies["packing"],
        pairing=policies["pairing"],
        schedule=policies["pipeline"],
        microbatch_tokens=config.data.microbatch_tokens,
        table=table,
        party=party_size(llm, arrangement, sharing[LLM].pool.num_members),
        single_queue=arrangement.domain_size > 1 and cluster.queues == "one",
        encoder_bytes=config.pipeline.encoder_bytes,
    )
    budget, group_size = _budget(config, policies, arrangement), _group_size(config, arrangement)
    return Planner(
        world=WorldPlanner(samples, budget, policies["deal"], arrangement.num_domains, group_size),
        group=GroupPlanner(policies["balance"], arrangement.replicas),
        domain=domain,
        frozen=partial(frozen_components, config.optim.components),
        share=share,
        fits=partial(fits, workload),
    )


def _cluster(config: Config, arrangement: Arrangement, framework: Framework | None) -> Cluster:
    """What ranks and links reach, under our kernels or those of another framework."""
    cluster = cluster_of(config.cluster, config.train.precision)
    return cluster if framework is None else framework.on(cluster, arrangement.llm.cp)


def _open(
    config: Config,
    encoders: Mapping[str, Encoder],
    tokenizer: Tokenizer,
    by_modality: Mapping[str, str],
    trace: Sequence[SampleMeta],
) -> tuple[dict[str, Index], dict[str, Index], Samples]:
    """Open the indexes of the training sources and of those held out; where there is a trace, none. Return
    them, and where steps take their samples from.
    """
    if trace:
        modalities = dict.fromkeys(item.modality for meta in trace for item in meta.items)
        _check_modalities("the trace", tuple(modalities), by_modality)
        return {}, {}, in_order(trace)
    if not config.data.sources:
        raise ConfigError("data.sources is empty: name at least one dataset, such as data=quickstart")
    indexes = _open_all("data.sources", config.data.sources, tokenizer, by_modality)
    heldout = _open_all("data.heldout", config.data.heldout, tokenizer, by_modality)
    return indexes, heldout, _indexed(config, encoders, indexes)


def _indexed(config: Config, encoders: Mapping[str, Encoder], indexes: Mapping[str, Index]) -> Samples:
    """The samples of datasets, in the order of the run."""
    counts = RememberedCounts(partial(item_count, encoders))
    return Samples(
        _stream(config, indexes),
        metas=lambda source, sample: indexes[source].meta(sample, source, counts),
        lengths=lambda source, ids, budget, policy: indexes[source].lengths(ids, counts, budget, policy),
        items=lambda source, ids: indexes[source].item_tokens(ids, counts),
    )


def _feeds(
    config: Config, encoders: Mapping[str, Encoder], arrangement: Arrangement, vocab_size: int
) -> tuple[tuple[str, tuple[Point, ...]], ...]:
    """The attach points of the encoders whose rows enter elsewhere than at the embedding alone."""
    parts = llm_parts(config.model.llm, vocab_size, arrangement.llm)
    points = attach_points([name for encoder in encoders.values() for name in encoder.attach], parts)
    return tuple(
        (name, tuple(points[p] for p in encoder.attach))
        for name, encoder in encoders.items()
        if encoder.attach != (EMBEDDING.name,)
    )


def _group_size(config: Config, arrangement: Arrangement) -> int:
    """Domains among which samples are reordered: as asked, or as many as hold GROUP_REPLICAS replicas, of
    small ones as many as hold GROUP_RANKS ranks.
    """
    most = max(GROUP_REPLICAS // arrangement.replicas, GROUP_RANKS // arrangement.domain_size)
    return config.balance.group or max(1, most)


def _make_encoders(config: Config) -> dict[str, Encoder]:
    if LLM in config.model.encoders:
        raise ConfigError(f"model.encoders.{LLM}: this name is the LLM's; choose another")
    return {name: make_encoder(name, options) for name, options in config.model.encoders.items()}


def _by_modality(encoders: Mapping[str, Encoder]) -> dict[str, str]:
    out: dict[str, str] = {}
    for name, encoder in encoders.items():
        if encoder.modality in out:
            raise ConfigError(
                f"model.encoders.{name} and model.encoders.{out[encoder.modality]} both take "
                f"{encoder.modality} items: keep one"
            )
        out[encoder.modality] = name
    return out


def tokenizer_of(config: Config) -> Tokenizer:
    """Return the tokenizer of a run.

    Raises:
        ConfigError: if there is none of its name.
    """
    try:
        return get_tokenizer(config.data.tokenizer)
    except ValueError as error:
        raise ConfigError(f"data.tokenizer={config.data.tokenizer}: {error}") from error


def _open_all(
    section: str,
    sources: Mapping[str, SourceConfig] | Mapping[str, HeldoutConfig],
    tokenizer: Tokenizer,
    by_modality: Mapping[str, str],
) -> dict[str, Index]:
    """Open the indexes of a section, whose items encoders must take."""
    indexes = {}
    for name, source in sources.items():
        try:
            indexes[name] = Index.open(source.path, tokenizer.name)
        except DataError as error:
            path = Path(source.path)
            sought = "" if path.is_absolute() or path.exists() else _SOUGHT.format(Path.cwd())
            raise DataError(f"{section}.{name}.path={source.path}{sought}: {error}") from error
        _check_modalities(f"{section}.{name}", indexes[name].manifest.modalities, by_modality)
    return indexes


def _check_modalities(source: str, held: Sequence[str], by_modality: Mapping[str, str]) -> None:
    for modality in held:
        if modality not in by_modality:
            raise ConfigError(
                f"{source} holds {modality} items, and no encoder of model.encoders takes them "
                f"(there are encoders for: {', '.join(by_modality) or 'nothing'})"
            )


def _stream(config: Config, indexes: Mapping[str, Index]) -> Stream:
    specs = {
        name: SourceSpec(len(index), index.manifest.rows_per_group, config.data.sources[name].weight)
        for name, index in indexes.items()
    }
    return Stream(specs, config.train.seed, config.data.window_groups)


def _budget(config: Config, policies: Chosen, arrangement: Arrangement) -> Budget:
    data = config.data
    if (data.step_tokens is None) == (data.step_samples is None):
        raise ConfigError(
            f"data.step_tokens={data.step_tokens}, data.step_samples={data.step_samples}: set exactly one"
        )
    check_long_samples(data, policies["llm_sp"], arrangement)
    return Budget(
        data.microbatch_tokens, data.step_tokens, data.step_samples, data.on_long, data.sample_tokens
    )
