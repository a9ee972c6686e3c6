"""Who takes part in what the ranks of a domain do together, and in which lines it waits.

A channel connects the teams that share a communicator, with a queue for each of them: `pipeline/simulator.py`
completes a transfer once it is first in all of its queues.
"""

from collections.abc import Mapping

from pipeline.domain_plan import DomainPlan
from pipeline.ops import BACKWARDS, Kind, Op

Name = tuple[object, ...]


class Transfer:
    """What teams take part in together: a message, a collective, compute whose layers communicate.

    All of them give it the same `name`. It completes once it is first in line at all `teams`: it runs from
    `start` to `done`, -1 before. `came` are, for each team that has issued it, when, how much earlier it
    began, and in which queue; `ready` counts those where it is first. `behind` is what must be complete
    before, for reductions.
    """

    __slots__ = ("behind", "came", "done", "name", "ns", "ready", "start", "teams", "waiting")

    def __init__(self, name: Name, teams: tuple[int, ...], ns: int = 0) -> None:
        self.name, self.teams, self.ns = name, teams, ns
        self.start, self.done, self.ready = -1, -1, 0
        self.came: list[tuple[int, int, Queue]] = []
        self.behind: Transfer | None = None
        self.waiting: list[int] = []


class Queue:
    """Transfers of one team on one channel, in the order of issue: those before `head` are complete, the
    last of them at `free`.
    """

    __slots__ = ("free", "head", "team", "transfers")

    def __init__(self, team: int) -> None:
        self.team = team
        self.transfers: list[Transfer] = []
        self.head = self.free = 0

    def free_for(self, before: int) -> int:
        """Return when the first in line may begin: behind a backward so long before that ends."""
        behind = self.head > 0 and self.transfers[self.head - 1].name[0] in BACKWARDS
        return self.free - before * behind


class Channel:
    """Transfers between the same teams, with a queue for each of these."""

    __slots__ = ("name", "queues", "teams", "transfers")

    def __init__(self, name: Name, queues: dict[int, Queue]) -> None:
        self.name, self.queues, self.teams = name, queues, tuple(queues)
        self.transfers: dict[Name, Transfer] = {}


class Channels:
    """The channels of a domain, each made when the first op on it is met."""

    def __init__(self, domain: DomainPlan, single_fifo: bool) -> None:
        self.domain = domain
        self.found: dict[Name, Channel] = {}
        self.passes: dict[int, Channel | None] = {}
        self.messages: dict[tuple[int, Kind, int], tuple[Channel, int]] = {}
        self.places = {pair: place for place, pair in enumerate(domain.reductions)}
        self.queues = {team: Queue(team) for team in domain.teams} if single_fifo else None
        # The reductions of a rank share its links.
        self.reducing = self.queues or {team: Queue(team) for team in domain.teams}

    def channel(
        self, name: Name, teams: tuple[int, ...] | range, queues: Mapping[int, Queue] | None = None
    ) -> Channel:
        """Return the channel of a name, which connects `teams`, with queues of its own unless given."""
        channel = self.found.get(name)
        if channel is None:
            queues = queues or self.queues
            own = {team: queues[team] if queues else Queue(team) for team in teams}
            channel = self.found[name] = Channel(name, own)
        return channel

    def collective(self, kind: Kind) -> Channel:
        """The channel of SHIP or RETURN: all teams of the domain."""
        return self.channel((kind,), self.domain.teams)

    def reduction(self, op: Op) -> Channel:
        """The channel of a REDUCE: the teams that hold what it reduces."""
        return self.channel(self.name_of(op), self.domain.reducing(op), self.reducing)

    def name_of(self, op: Op) -> Name:
        """The name of the channel of a REDUCE; names are in the order of the plan's reductions."""
        return Kind.REDUCE, self.places.get((op.index, op.virtual_stage), -1), op.index, op.virtual_stage

    def compute(self, op: Op, team: int) -> Channel | None:
        """The channel of the layers of a compute op, None if they do not communicate."""
        if op.kind in (Kind.ENCODE, Kind.ENCODE_BACKWARD):
            return self._together(op, team)
        if team not in self.passes:
            self.passes[team] = self._together(op, team)
        return self.passes[team]

    def _together(self, op: Op, team: int) -> Channel | None:
        ranks, size = self.domain.collective_group_of(op, team * self.domain.team), self.domain.team
        if len(ranks) == 1:
            return None
        first, last = ranks[0] // size, ranks[-1] // size
        return self.channel((first, last), range(first, last + 1))

    def message(self, op: Op, team: int) -> tuple[Channel, int]:
        """The channel of a message, and the virtual stage that sends it: of an output, the one below; of a
        gradient, the one above.
        """
        key = (team, op.kind, op.virtual_stage)
        found = self.messages.get(key)
        if found is None:
            size = self.domain.team
            teams = tuple(domain_rank // size for domain_rank in self.domain.sender(op, team * size))
            forward = op.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
            shift = {Kind.RECV_FORWARD: -1, Kind.RECV_BACKWARD: 1}.get(op.kind, 0)
            channel = self.channel(("activation" if forward else "gradient", *teams), teams)
            found = self.messages[key] = channel, op.virtual_stage + shift
        return found
