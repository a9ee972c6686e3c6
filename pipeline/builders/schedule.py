"""What a schedule is: from a domain's work to an order of compute for each of its teams.

A builder orders compute; `pipeline/expand.py` then inserts every communication and every wait by fixed rules,
so that a new schedule is only a new order of compute. Builders are pure and every rank runs them alike. They
are given the costs of ops, so that a schedule may be placed by them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from parallel.policy import Policy
from pipeline.costs import Costs
from pipeline.domain_plan import DomainPlan
from pipeline.ops import Kind, Op
from pipeline.policies import TpGroup
from pipeline.rules.memory import Kept

Order = list[list[Op]]


class TeamEncoderBatch(NamedTuple):
    """An encoder batch that a team encodes: its number, and the first and last of its microbatches."""

    number: int
    first: int
    last: int


MANY_ENCODER_BATCHES = 64


@dataclass(frozen=True)
class Facts:
    """What a schedule may be built by, beside the domain: what ops take (`costs`) and keep (`kept`), where an
    encoder batch of an encoder may run (`tp_groups`), the components that do not learn in this step
    (`frozen`), and whether passes stand in `one_queue` with messages, which then wait until both ends are
    between two ops or two parts of a pass.
    """

    costs: Costs
    kept: Kept
    tp_groups: Mapping[str, Sequence[TpGroup]] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    one_queue: bool = False


Builder = Callable[[DomainPlan, Facts], Order]
"""From a domain without ops to the compute ops of each team, in order."""


@dataclass(frozen=True)
class SchedulePolicy(Policy):
    """In which order the teams of a domain run its encoder batches and microbatches in training.

    `decide` takes a DomainPlan without ops and its `Facts`, and returns for each team its compute ops in
    order; communication and waits are inserted afterwards, by rules that are the same for all
    schedules, and the verifier refuses what could hang. A backward may be split in two ops. REDUCE ops of the
    domain's `reductions` may be among them, all of a reduction or none; those left out are issued as soon as
    their gradients are complete.
    `in_flight` says from the domain and the number of a virtual stage how many microbatches' activations that
    one holds at most, as 1F1B unless given: with their sizes, the bound that the plan carries. `vpp` is how
    many virtual stages on a rank it can order at most, None for any number.

    A schedule with `encoder_batches` says where encoder batches run: one of a single tp group goes where the
    order encodes it. Items that stay whole come to it as about so many encoder batches for each tp group and
    microbatch, or in long steps as `encoder_batches_for` says, of about equal cost, and routes are planned
    after it. They are fewer where starting them takes more than they fill of a pipeline's gaps, unless the
    schedule is `uniform`. Of a policy with `candidates` nothing else counts: the planner plans with each of
    them and keeps what takes the least simulated time. One that encodes all items `at_once`, before any pass
    of the LLM, has those of several microbatches encoded together where that takes less time. One that is
    `deep` holds more activations than 1F1B, up to about twice, and is tried only if what fits is known; where
    it does not fit, one that is `shallower` is. Where no candidate fits, in however many rounds
    (`rounds.py`), those that are `lean` are tried in turn.
    """

    group: ClassVar[str] = "omni.schedule"

    in_flight: Callable[[DomainPlan, int], int] = lambda domain, number: domain.num_virtual_stages - number
    vpp: int | None = 1
    encoder_batches: int = 0
    uniform: bool = False
    at_once: bool = False
    deep: bool = False
    shallower: "SchedulePolicy | None" = None
    candidates: tuple["SchedulePolicy", ...] = ()
    lean: tuple["SchedulePolicy", ...] = ()

    @property
    def fills_gaps(self) -> bool:
        """Whether it places encoder batches in the gaps that passes leave."""
        return self.encoder_batches > 0 and not self.uniform

    @property
    def encodes_ahead(self) -> bool:
        """Whether it encodes more than the next passes need, so that encoders hold less in several rounds."""
        return self.at_once or self.encoder_batches > 0

    def encoder_batches_for(self, microbatches: int, bounded: bool) -> int:
        """Return how many encoder batches each tp group has in a step of so many microbatches:
        `encoder_batches` for each.

        Beyond 64 in all one for each is enough, since coarse encoder batches fit the gaps of a long step as
        well; but not where activations are `bounded` and only few encoder batches may be alive.
        """
        each = self.encoder_batches * microbatches
        return each if bounded else min(each, max(MANY_ENCODER_BATCHES, microbatches))

    def __call__(self, domain: DomainPlan, facts: Facts) -> Order:
        """Order the compute of every team.

        Raises:
            PolicyError: if there is not one list for each team.
        """
        with self.asked():
            order = self.decide(domain, facts)
            num_lists = len(order)
        self.require(num_lists == len(domain.teams), "one list of ops for each team of the domain")
        return order


def candidates_of(
    policy: SchedulePolicy, vpp: int, stages: int, *, guarded: bool = True
) -> tuple[SchedulePolicy, ...]:
    """Return the schedules to plan with: a policy, or its candidates for `vpp` virtual stages on a rank.

    Of these, schedules for any number of virtual stages are tried where there are several, and deep ones only
    where plans are `guarded` by what devices hold. With one stage nothing idles that could be filled: those
    are tried then that neither split backwards nor place encoder batches.
    """
    if not policy.candidates:
        return (policy,)
    usable = tuple(each for each in policy.candidates if guarded or not each.deep)
    usable = tuple(each for each in usable if (each.vpp is None) == (vpp > 1))
    plain = (
        each for each in usable if not each.encoder_batches and each.in_flight is SchedulePolicy.in_flight
    )
    return (tuple(plain) if stages == 1 else ()) or usable


def lean_of(policy: SchedulePolicy, vpp: int) -> tuple[SchedulePolicy, ...]:
    """Return the schedules to try in turn where none of `candidates_of` fits in any number of rounds."""
    return tuple(each for each in policy.lean if (each.vpp is None) == (vpp > 1))


def as_ordered(domain: DomainPlan, order: Order) -> DomainPlan:
    """Return a domain with its encoder batches of one tp group on the ranks that encode them in an order."""
    teams: dict[int, list[int]] = {}
    for team, ops in enumerate(order):
        for op in ops:
            if op.kind is Kind.ENCODE:
                teams.setdefault(op.index, []).append(team)
    size = domain.team
    encoder_batches = [
        replace(batch, ranks=tuple(range(of[0] * size, (of[-1] + 1) * size)))
        if batch.layout.num_cp_ranks == 1 and (of := teams.get(number))
        else batch
        for number, batch in enumerate(domain.encoder_batches)
    ]
    return replace(domain, encoder_batches=tuple(encoder_batches))


def build_forward_only(domain: DomainPlan) -> Order:
    """Evaluation: each microbatch's encoder work, then its forward; nothing goes back."""
    order = []
    for team, mine in enumerate(encoder_batches_by_team(domain)):
        ops = []
        for m in range(len(domain.microbatches)):
            ops += [Op(Kind.ENCODE, c) for c, first, _ in mine if first == m]
            ops += [Op(Kind.FORWARD, m, virtual_stage=virtual_stage) for virtual_stage in domain.holds[team]]
        order.append(ops)
    return order


def encoder_batches_by_team(domain: DomainPlan) -> Iterator[list[TeamEncoderBatch]]:
    """Yield for each team its encoder batches, earlier microbatches first: an order that ranks which encode
    together share, wherever they stand.
    """
    mine: list[list[TeamEncoderBatch]] = [[] for _ in domain.teams]
    for number, batch in sorted(enumerate(domain.encoder_batches), key=lambda entry: entry[1].microbatches):
        entry = TeamEncoderBatch(number, batch.microbatches[0], batch.microbatches[-1])
        for rank in range(batch.ranks[0], batch.ranks[-1] + 1, domain.team):
            mine[rank // domain.team].append(entry)
    yield from mine


def without_frozen(order: Order, domain: DomainPlan, frozen: frozenset[str]) -> Order:
    """Drop what is not run for components frozen this step: the backward of encoders, and the gradients of
    the LLM's weights, through which the others' gradients still pass.
    """
    idle = {number for number, batch in enumerate(domain.encoder_batches) if batch.component in frozen}

    def runs(op: Op) -> bool:
        if op.kind is Kind.BACKWARD:
            return domain.llm_learns or op.makes_input
        return op.kind is not Kind.ENCODE_BACKWARD or op.index not in idle

    return [[op for op in ops if runs(op)] for ops in order]
