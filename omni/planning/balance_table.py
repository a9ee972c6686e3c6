"""Many choices of policies and sizes scored on the same samples: the table, and which of them to suggest."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from dataloader.balance import BalancePolicy
from dataloader.tokens import SampleMeta
from omni.config import Config
from omni.planning.balance_score import Score, Step, as_planned, perturbed, score_step, step_of
from omni.planning.choice import unchosen
from omni.planning.choices import with_pairing
from omni.planning.planner import Planner
from omni.planning.prepare import prepare_run
from parallel.policy import PolicyError, find

NO_SHARING = "none"
OFF = 0.2  # share by which costs are off where they are perturbed
SEED = 0
NEAR = 1.005  # of the best step that smaller domains and groups may take


@dataclass(frozen=True)
class Choice:
    """What a user can choose: the policy of balance, who shares sequences, replicas of a domain, and domains
    of a group that reorder their samples among them.
    """

    policy: str
    sharing: str
    domain: int
    group: int


@dataclass(frozen=True)
class Row:
    """A choice, its score with the costs it was planned with, and with costs that are up to `OFF` off."""

    choice: Choice
    planned: Score
    off: Score


def planner_of(config: Config, world: int, trace: Sequence[SampleMeta], choice: Choice) -> Planner:
    """Resolve a configuration with a choice in place of its own, for steps of a trace, or of its own data if
    there is none.

    Without sharing the LLM's sequences stay on the cp ranks of their replica (`uniform`).

    Raises:
        ConfigError, LayoutError, PolicyError, DataError: all ValueError, naming the key, the value and the
            remedy.
    """
    config = unchosen(with_pairing(config))
    data = config.data
    # Who shares may take longer samples than others: all are scored on the same ones.
    data.microbatch_tokens, data.sample_tokens = data.sample_tokens or data.pass_tokens, None
    config.layout.domain = choice.domain
    config.balance.policy = choice.policy
    config.balance.group = choice.group
    config.encoder_sp.policy = choice.sharing
    config.llm_sp.policy = "uniform" if choice.sharing == NO_SHARING else choice.sharing
    return prepare_run(config, world, trace).planner


def choices(
    config: Config,
    world: int,
    trace: Sequence[SampleMeta],
    policies: Sequence[str],
    sharings: Sequence[str],
    domains: Sequence[int],
    groups: Sequence[int],
) -> Iterator[tuple[Choice, Planner, Step]]:
    """Resolve every policy of balance, way to share, size of domains and size of groups, each with the first
    step. Groups are given in replicas: of fewer than a domain has, they are one domain, of more than there
    are, all.
    """
    for domain in domains:
        for sharing in sharings:
            planner = planner_of(config, world, trace, Choice(policies[0], sharing, domain, 1))
            step, most = step_of(planner), planner.domain.arrangement.num_domains
            sizes = dict.fromkeys(min(most, max(1, group // domain)) for group in groups)
            for size, policy in product(sizes, policies):
                chosen = find(BalancePolicy, policy, "balance.policy")
                choice = Choice(policy, sharing, domain, size)
                own = replace(
                    planner,
                    world=replace(planner.world, group_size=size),
                    group=replace(planner.group, balance=chosen),
                )
                yield choice, own, step


def usable(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Divide policies of balance into those that can be imported, and the others with what is wrong."""
    broken = {}
    for name in names:
        try:
            find(BalancePolicy, name, "balance.policy")
        except PolicyError as error:
            broken[name] = str(error)
    return [name for name in names if name not in broken], broken


def row_of(choice: Choice, planner: Planner, step: Step) -> Row:
    """Score a choice."""
    planned, off = score_step(planner, step, [as_planned(step.metas), perturbed(step.metas, OFF, SEED)])
    return Row(choice, planned, off)


def scored(
    found: Iterable[tuple[Choice, Planner, Step]], broken: dict[str, str] | None = None
) -> Iterator[tuple[Row, Planner, Step]]:
    """Score every choice, those that cannot but leave the same step once.

    With `broken`, a policy that raises is entered there by name, with what it said, and its choices are left
    out from then on.
    """
    known: dict[tuple[bool | str, ...], Row] = {}
    for choice, planner, step in found:
        shares = any(of.num_cp_ranks > 1 for of in planner.domain.sharing.values())
        within = planner.domain.sharing[planner.domain.llm].policy.within_replica
        # In a group of one domain only which replica takes a sample is open, if that matters.
        decides = choice.group > 1 or (planner.domain.arrangement.replicas > 1 and within)
        key = (str(choice.domain), str(choice.group), decides and choice.policy, shares and choice.sharing)
        if broken is not None and choice.policy in broken:
            continue
        try:
            row = known.get(key) or row_of(choice, planner, step)
        except Exception as error:  # of a foreign policy any kind
            if broken is None:
                raise
            broken[choice.policy] = f"{type(error).__name__}: {error}"
            continue
        known[key] = row
        yield replace(row, choice=choice), planner, step


def best(rows: Sequence[Row]) -> Row:
    """The row to choose: of those within `NEAR` of the least step by perturbed costs the smallest domain,
    then the smallest group; then what shares nothing, then the least.
    """
    least = min(row.off.overlapped for row in rows)
    near = [row for row in rows if row.off.overlapped <= NEAR * least]

    def rank(row: Row) -> tuple[int, int, bool, float, str]:
        choice = row.choice
        return choice.domain, choice.group, choice.sharing != NO_SHARING, row.off.overlapped, choice.policy

    return min(near, key=rank)


TITLES = (
    f"{'sharing':8} {'domain':>6} {'group':>5} {'policy':16} {'encoder':>8} {'llm':>6} {'step':>6} "
    f"{'in turn':>8} {'off 20 %':>9} {'bound':>6} {'MiB across':>11}"
)


def text_of(row: Row) -> str:
    """A line under `TITLES`."""
    choice, of = row.choice, row.planned
    chosen = f"{choice.sharing:8} {choice.domain:6} {choice.group:5} {choice.policy:16}"
    return (
        f"{chosen} {of.encoder:8.3f} {of.llm:6.3f} {of.overlapped:6.3f} {of.in_turn:8.3f} "
        f"{row.off.overlapped:9.3f} {of.bound:6.3f} {of.across_bytes / 2**20:11.1f}"
    )
