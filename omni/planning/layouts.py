"""How many ranks a launch has, and where everything lives on them: layouts resolved and checked."""

from collections.abc import Collection, Mapping, Sequence

from infra.machine import crowding, this_machine
from omni.config import ConfigError, LaunchConfig, LayoutConfig, LLMLayoutConfig, PlacementConfig
from omni.llm_config import LLMConfig
from omni.models.llm import check_llm_layout
from omni.models.registry import Encoder, naming
from omni.planning.allocation import ranks_beside
from ops.device import visible_devices
from parallel.layout import CONTEXT, Arrangement, Layout, LayoutError, arrange, check_sizes, nearest_divisor
from parallel.placements import PlacementPolicy
from parallel.policy import find
from pipeline.builders import SchedulePolicy


def count_ranks(launch: LaunchConfig) -> int:
    """Return how many ranks a launch on this machine starts: as asked, or one a GPU, or two without GPUs.

    Raises:
        ConfigError: for more than there are GPUs, or, unless `launch.oversubscribe` is set,
            more than the cores and the memory of this machine can take.
    """
    gpus = visible_devices()
    ranks = launch.ranks or gpus or 2
    if 0 < gpus < ranks:
        raise ConfigError(f"launch.ranks={ranks}: this machine has {gpus} GPUs, and every rank needs its own")
    crowded = None if launch.oversubscribe else crowding(ranks, this_machine())
    if crowded:
        raise ConfigError(
            f"launch.ranks={ranks}: {crowded}; choose fewer, or set launch.oversubscribe=true. What does "
            f"not fit this machine can be planned (omni plan) and rehearsed (omni rehearse)"
        )
    return ranks


def planned_ranks(launch: LaunchConfig) -> int:
    """Return how many ranks to plan for where none are started: as asked, or two."""
    return launch.ranks or 2


def resolve_layout(
    config: LayoutConfig, placement: PlacementConfig, encoders: Collection[str], world: int
) -> Arrangement:
    """Fill in the data-parallel size and arrange the LLM and the `encoders`, by name, over the world. Where
    a placement takes ranks and nobody says how many, these are the fewest that can be.

    Raises:
        LayoutError: for sizes that do not fit the world or each other, with the remedy.
        PolicyError: for a placement that is not registered.
    """
    policy = find(PlacementPolicy, placement.policy, "placement.policy")
    sizes = config.llm
    unknown = sorted(set(config.encoders) - set(encoders))
    if unknown:
        raise LayoutError(
            f"layout.encoders.{unknown[0]}: there is no such encoder (model.encoders has: "
            f"{', '.join(encoders) or 'none'})"
        )
    check_sizes(vars(sizes))
    split = ((axis, getattr(sizes, axis)) for axis in ("tp", "cp", "pp"))
    own = ", ".join(f"layout.llm.{axis}={size}" for axis, size in split if size > 1) or "layout.llm"
    tp = {name: config.encoders[name].tp if name in config.encoders else 1 for name in encoders}
    domain = 1 if config.domain is None else config.domain  # null: the least, until one is chosen
    beside = placement.ranks
    if beside is None:
        beside = ranks_beside(world, sizes, tp, policy, max(1, domain)) if policy.beside else 0
    if beside < 0:
        raise LayoutError(f"placement.ranks={beside}: must be at least 0")
    copy = sizes.tp * sizes.cp * sizes.pp
    dp = sizes.dp
    if dp is None:
        if world <= beside or (world - beside) % copy:
            rest = f"the {world} ranks of this launch" + (f", less {beside} for encoders" if beside else "")
            raise LayoutError(
                f"{own}: a replica of {copy} ranks does not divide {rest}: "
                f"choose launch.ranks as a multiple of {copy}"
                + (f", plus {beside}" if beside else "")
                + f": {max(copy, round((world - beside) / copy) * copy) + beside} is the nearest"
            )
        dp = (world - beside) // copy
    if config.domain is None and (sizes.zero or 1) > 1 and sizes.cp == 1:
        domain = next((n for n in range(2, dp + 1) if dp % n == 0), 1)  # a pool that can divide something
    context = CONTEXT if config.context is None else config.context  # null: until one is chosen
    if context < 1:
        raise LayoutError(f"layout.context={context}: a sequence has at least one token")
    layout = Layout(sizes.tp, sizes.cp, dp, sizes.pp, sizes.ep, sizes.vpp or 1, sizes.zero or 1, context)
    if layout.world + beside != world:
        raise LayoutError(
            f"{own}, layout.llm.dp={dp} and placement.ranks={beside} take {layout.world + beside} ranks, "
            f"but there are {world}: set launch.ranks={layout.world + beside}, or dp=null to take all ranks"
        )
    if domain < 1 or layout.dp % domain:
        raise LayoutError(
            f"layout.domain={domain} does not divide the {layout.dp} replicas (dp): choose a divisor of it: "
            f"{nearest_divisor(domain, layout.dp)} is the nearest"
        )
    return arrange(layout, tp, policy, beside, domain)


def check_layout(
    llm: LLMConfig,
    encoders: Mapping[str, Encoder],
    arrangement: Arrangement,
    others: Sequence[LLMLayoutConfig],
    vocab_size: int,
) -> None:
    """Refuse an arrangement, and `others` for other numbers of ranks, that the sizes of the components do not
    allow.

    Raises:
        ConfigError, LayoutError: naming the key, the value and the remedy.
    """
    check_llm_layout(llm, arrangement.llm, vocab_size)
    check_zero(arrangement)
    for name, tp in arrangement.encoder_tp.items():
        if tp > 1:
            with naming(name):
                encoders[name].check_tp(f"layout.encoders.{name}.tp", tp)
    for number, sizes in enumerate(others):
        try:
            check_sizes(vars(sizes))
            layout = Layout(
                **{**vars(sizes), "dp": sizes.dp or sizes.ep, "vpp": sizes.vpp or 1, "zero": sizes.zero or 1}
            )
            check_llm_layout(llm, layout, vocab_size)
        except ValueError as error:
            raise LayoutError(f"launch.layouts[{number}]: {error}") from error


def check_zero(arrangement: Arrangement) -> None:
    """Refuse to divide weights or gradients over pools of one rank.

    Raises:
        LayoutError: with the nearest domain that has more.
    """
    zero, dp = arrangement.llm.zero, arrangement.llm.dp
    if zero == 1 or arrangement.pool > 1:
        return
    least = next((n for n in range(2, dp + 1) if dp % n == 0), None)
    larger = f"layout.domain={least}" if least else "launch.ranks so that there are replicas"
    raise LayoutError(
        f"layout.llm.zero={zero} divides what a pool's ranks hold, the cp={arrangement.llm.cp} of each of "
        f"layout.domain={arrangement.replicas} replicas, and one rank has nothing to divide: set {larger}, "
        "or zero=1"
    )


def check_vpp(llm: LLMLayoutConfig, others: Sequence[LLMLayoutConfig], schedule: SchedulePolicy) -> None:
    """Raise ConfigError where the layout, or one of the `others` for other numbers of ranks, has more virtual
    stages on a rank than the schedule can order.
    """
    named = {f"launch.layouts[{number}]": sizes for number, sizes in enumerate(others)}
    for layout, sizes in {"layout.llm": llm, **named}.items():
        if schedule.vpp is not None and (sizes.vpp or 1) > schedule.vpp:
            raise ConfigError(
                f"{layout}.vpp={sizes.vpp}: pipeline.policy={schedule.name} orders at most "
                f"{schedule.vpp} on a rank: set {layout}.vpp={schedule.vpp}, or choose one for "
                "several, such as interleaved"
            )


def check_pools(domain: int | None, others: Sequence[LLMLayoutConfig]) -> None:
    """Refuse layouts for other numbers of ranks that divide weights or gradients over pools of one rank,
    whatever the number. The `domain` is None where it is chosen for each.

    Raises:
        LayoutError: naming the key, the value and the remedy.
    """
    for number, sizes in enumerate(others):
        if (sizes.zero or 1) == 1 or sizes.cp > 1 or 1 not in (domain, sizes.dp):
            continue
        own = f"launch.layouts[{number}]"
        single, more = "layout.domain=1", "layout.domain=2"
        if sizes.dp == 1:
            single, more = f"{own}.dp=1", f"{own}.dp=2"
        raise LayoutError(
            f"{own}.zero={sizes.zero} divides what a pool's ranks hold, and with cp=1 and {single} that is "
            f"one rank, with nothing to divide: set {more}, or {own}.zero=1"
        )
