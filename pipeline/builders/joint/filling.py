"""Encoder work in the gaps of a pipeline: list scheduling (Graham, 1969) around a given order of passes.

Time runs from event to event. A unit that is free does the first of these that it can:

1. the encoding of an encoder batch that the first virtual stage needs next, before a forward; or, if the
   bound on activations is in the way, the backward of another;
2. the next pass of the LLM in its crew's order, or if that must wait, the next backward of this order;
3. the encoding of its next encoder batch, as far ahead as the bound allows;
4. the backward of an encoder batch whose gradients are back, if that holds up no pass so long that the last
   one ends later than it must anyway, or if the bound keeps the unit from encoding; of an encoder batch
   longer than any pass once no pass is left. What is put off so runs after the passes, where shares leave
   room for it.

Barriers, encoder batches that several units encode together, are encoded as early as the bound allows, and go
back once their units have no passes left, or when nothing else can go on.

Where passes stand in one queue with messages, ranks must meet between two ops for each message, and encoder
batches between passes would keep others waiting: there units encode `apart`, all encoder batches of a crew
before its passes, as far as bounds allow, and go back after them. Late stages, which wait for their first
pass, still encode longer.

A crew that has begun to gather for a pass runs it first; other units that a barrier waits for start nothing
else. One barrier gathers at a time, so no two wait for each other.

Times are integer nanoseconds of one common clock. The result is an order, not a promise: ranks wait for each
other's results, never for the clock.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from pipeline.builders.joint.crews import Crews
from pipeline.builders.joint.timed import Boundary, Pass, TimedEncoderBatch
from pipeline.ops import Kind, Op

NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Bounds:
    """What limits the filling. Activations of encoder batches stay within `room` bytes on a unit, unless a
    microbatch needs more. To make room for encoder work a pass may start up to `late` ns after its latest
    start time, or as late as an earlier pass was already delayed. Where encoder batches stay `apart`, they
    come between passes only where the room leaves no other place.
    """

    room: int
    late: int
    apart: bool


def fill(
    crews: Crews,
    passes: Sequence[Sequence[Pass]],
    encoder_batches: Sequence[Sequence[TimedEncoderBatch]],
    barriers: Sequence[TimedEncoderBatch],
    boundary: Boundary,
    bounds: Bounds,
) -> list[list[Op]]:
    """Return the ops of each unit: the `passes` of its crew and its `encoder_batches` and `barriers`, of
    which the encoding keeps the given order.
    """
    return _Filling(crews, passes, encoder_batches, barriers, boundary, bounds).run()


class _Filling:
    def __init__(
        self,
        crews: Crews,
        passes: Sequence[Sequence[Pass]],
        encoder_batches: Sequence[Sequence[TimedEncoderBatch]],
        barriers: Sequence[TimedEncoderBatch],
        boundary: Boundary,
        bounds: Bounds,
    ) -> None:
        units, microbatches = len(crews.units), len(boundary.ship_ns)
        self.crews, self.boundary, self.bounds = crews, boundary, bounds
        self.out: list[list[Op]] = [[] for _ in range(units)]
        # Units: what each runs and until when; those that wait for others to come have no end.
        self.events = [(0, -unit) for unit in range(units)]
        self.running: list[tuple[Op, Pass | TimedEncoderBatch] | None] = [None] * units
        self.until = [0] * units
        # Passes: by crew those to come, the backwards among them, and the one that its units gather for.
        self.passes = [deque(of) for of in passes]
        self.backwards = [deque(one for one in of if one.goes_back) for of in passes]
        self.left = [len(of) for of in passes]
        self.late = bounds.late  # the most that a pass has begun after its latest moment
        self.gathering: list[Pass | None] = [None] * len(passes)
        self.gathered: set[int] = set()
        self.absent = [0] * len(passes)
        self.entering = dict.fromkeys(boundary.entered, 0)
        self.enters = 0  # the microbatch that the first virtual stage takes next
        self.unpassed = [0] * microbatches
        for one in (one for of in self.backwards for one in of):
            self.unpassed[one.op.index] += 1
        # Encoder batches: by unit those to encode, those to go back and from when on, and the bytes held for
        # them.
        self.ahead = [deque(of) for of in encoder_batches]
        self.back: list[deque[tuple[int, TimedEncoderBatch]]] = [deque() for _ in range(units)]
        self.later: list[deque[tuple[int, TimedEncoderBatch]]] = [deque() for _ in range(units)]  # long ones
        self.held = [0] * units
        self.unencoded = [0] * microbatches
        for batch in (*(one for of in encoder_batches for one in of), *barriers):
            for m in batch.microbatches:
                self.unencoded[m] += 1
        self.encoded: list[list[TimedEncoderBatch]] = [[] for _ in range(microbatches)]
        self.unreturned: dict[int, int] = {}
        self.next_shipped = self.ships_end = self.returns_end = 0
        # Barriers: those to encode, those to go back, and the one that gathers, with who has come.
        self.barriers = deque(barriers)
        self.barriers_back: deque[tuple[int, TimedEncoderBatch]] = deque()
        self.barrier: tuple[Op, TimedEncoderBatch] | None = None
        self.come: set[int] = set()

    def run(self) -> list[list[Op]]:
        """Run to the end, from event to event."""
        now = 0
        while True:
            while self.events:
                now = self.events[0][0]
                free = set()
                while self.events and self.events[0][0] == now:
                    unit = -heappop(self.events)[1]
                    if self.running[unit] is not None and self.until[unit] == now:
                        self.finish(unit, now)
                    free.add(unit)
                if self.barrier is None and (self.barriers or self.barriers_back):
                    free.update(self.next_barrier(now))
                for unit in sorted(free, reverse=True):
                    if self.running[unit] is None and not (unit in self.come or unit in self.gathered):
                        self.choose(unit, now)
            if not self.force(now):
                break
        assert not any((*self.left, *self.back, *self.later, self.barriers_back)), "something waits for ever"
        return self.out

    # What a free unit does.

    def choose(self, unit: int, now: int) -> None:
        """Start the first that a free unit can do, or leave it idle until something wakes it."""
        crew = self.crews.crew_of[unit]
        if self.gathering[crew] is not None:
            self.gather(crew, unit, now)
            return
        held_up = self.barrier is not None and self.is_for(self.barrier[1], crew)
        if self.barrier is not None and unit in self.barrier[1].units:
            self.come_to_barrier(unit, now)
            return
        back, ahead = self.back[unit], self.ahead[unit]
        if self.later[unit] and not (back or self.left[crew]):
            back.append(self.later[unit].popleft())
        may_go_back = bool(back) and back[0][0] <= now
        ready = None if held_up or self.awaits_encoder_batches(crew) else self.ready_pass(crew, unit, now)
        if ahead:
            first = ahead[0].microbatches[0]
            fits = self.fits(unit, ahead[0])
            urgent = first <= self.enters and (ready is None or not ready.goes_back)
            may_encode = ready is None or self.bounds.apart
            if urgent and not fits and (may_go_back or self.later[unit]):
                self.go_back(unit, now)
            elif fits and (urgent or may_encode):
                self.encode(unit, now)
            elif ready is not None:
                self.begin(crew, ready, unit, now)
            elif may_go_back and (not fits or self.has_time(unit, back[0][1], now)):
                self.go_back(unit, now)
        elif ready is not None:
            self.begin(crew, ready, unit, now)
        elif may_go_back and self.has_time(unit, back[0][1], now):
            self.go_back(unit, now)
        if self.running[unit] is None and back and not may_go_back:
            heappush(self.events, (back[0][0], -unit))

    def awaits_encoder_batches(self, crew: int) -> bool:
        """Whether units of a crew are yet to encode what is to be apart from their passes."""
        units = self.crews.crews[crew] if self.bounds.apart else ()
        return any(self.ahead[unit] and self.fits(unit, self.ahead[unit][0]) for unit in units)

    def ready_pass(self, crew: int, unit: int, now: int) -> Pass | None:
        """The pass that a crew may run now: the next in order, or the next backward if that is a forward that
        must wait.
        """
        passes = self.passes[crew]
        while passes and passes[0].begun:
            passes.popleft()
        if not passes:
            return None
        begins = passes[0].step.begins(passes[0].op.index)
        if 0 <= begins <= now:
            return passes[0]
        if begins > now:
            heappush(self.events, (begins, -unit))
        if not passes[0].goes_back and self.backwards[crew]:
            one = self.backwards[crew][0]
            begins = one.step.begins(one.op.index)
            if 0 <= begins <= now:
                return one
            if begins > now:
                heappush(self.events, (begins, -unit))
        return None

    def has_time(self, unit: int, batch: TimedEncoderBatch, now: int) -> bool:
        """Whether the next pass of a unit can wait for a backward and hold up the last pass no longer than it
        is, or the next barrier waits for room here.
        """
        crew = self.crews.crew_of[unit]
        passes = self.passes[crew]
        if not self.left[crew]:
            return True
        if not self.bounds.apart and now + batch.back_ns <= passes[0].latest + self.late:
            return True
        barrier = self.barriers[0] if self.barriers else None
        return barrier is not None and unit in barrier.units and not self.fits(unit, barrier)

    def fits(self, unit: int, batch: TimedEncoderBatch) -> bool:
        return self.held[unit] + batch.kept <= self.bounds.room

    # Passes.

    def begin(self, crew: int, one: Pass, unit: int, now: int) -> None:
        """Have the units of a crew gather for a pass, this one first."""
        one.begun = True
        self.late = max(self.late, now - one.latest)
        if one.goes_back:
            self.backwards[crew].popleft()
        elif one.op.kind is Kind.FORWARD and one.op.virtual_stage == 0:
            self.entering[crew] = one.op.index + 1
            self.enters = min(self.entering.values())
        units = self.crews.crews[crew]
        if len(units) == 1:
            self.start(unit, one.op, one, now + one.ns)
            return
        self.gathering[crew], self.absent[crew] = one, len(units)
        for other in units:
            if other != unit and self.running[other] is None:
                heappush(self.events, (now, -other))
        self.gather(crew, unit, now)

    def gather(self, crew: int, unit: int, now: int) -> None:
        """Note that a unit has come for the pass of its crew; when all have, it starts."""
        self.gathered.add(unit)
        self.absent[crew] -= 1
        if self.absent[crew]:
            return
        one, self.gathering[crew] = self.gathering[crew], None
        assert one is not None
        for each in self.crews.crews[crew]:
            self.gathered.discard(each)
            self.start(each, one.op, one, now + one.ns)

    # Encoder batches and barriers.

    def encode(self, unit: int, now: int) -> None:
        batch = self.ahead[unit].popleft()
        self.held[unit] += batch.kept
        self.start(unit, batch.encode, batch, now + batch.encode_ns)

    def go_back(self, unit: int, now: int) -> None:
        _, batch = (self.back[unit] or self.later[unit]).popleft()
        self.start(unit, batch.back, batch, now + batch.back_ns)

    def is_for(self, batch: TimedEncoderBatch, crew: int) -> bool:
        units = self.crews.crews[crew]
        return units[0] <= batch.units[-1] and batch.units[0] <= units[-1]

    def next_barrier(self, now: int, forced: bool = False) -> Sequence[int]:
        """Let the next barrier gather that may: the units that it waits for."""
        if self.barriers:
            batch = self.barriers[0]
            if forced or all(self.fits(unit, batch) for unit in batch.units):
                self.barriers.popleft()
                for unit in batch.units:
                    self.held[unit] += batch.kept
                self.barrier = batch.encode, batch
                return batch.units
        if self.barriers_back and (forced or self.barriers_back[0][0] <= now):
            batch = self.barriers_back[0][1]
            crews = {self.crews.crew_of[unit] for unit in batch.units}
            if forced or not any(self.left[crew] for crew in crews):
                self.barriers_back.popleft()
                self.barrier = batch.back, batch
                return batch.units
        return ()

    def come_to_barrier(self, unit: int, now: int) -> None:
        assert self.barrier is not None
        self.come.add(unit)
        op, batch = self.barrier
        if not all(each in self.come for each in batch.units):
            return
        self.barrier = None
        ns = batch.encode_ns if op.kind is Kind.ENCODE else batch.back_ns
        for each in batch.units:
            self.come.discard(each)
            self.start(each, op, batch, now + ns)

    def force(self, now: int) -> bool:
        """Go on where the bound or the order of barriers lets nothing: with a barrier, or the encoder batch
        that is needed first. Returns whether there is anything.
        """
        assert not any((self.barrier, self.gathered)), "units wait for others that never come"
        for unit, back in enumerate(self.back):
            if back:
                self.go_back(unit, max(now, back[0][0]))
                return True
        woken = list(self.next_barrier(max(now, self.returns_end), forced=True))
        units = [unit for unit, ahead in enumerate(self.ahead) if ahead]
        if woken:
            self.events = [(max(now, self.returns_end), -unit) for unit in woken]
        elif units:
            self.encode(min(units, key=lambda unit: self.ahead[unit][0].microbatches), now)
        return bool(self.events)

    # From start to end.

    def start(self, unit: int, op: Op, what: Pass | TimedEncoderBatch, end: int) -> None:
        self.running[unit], self.until[unit] = (op, what), end
        self.out[unit].append(op)
        heappush(self.events, (end, -unit))

    def finish(self, unit: int, now: int) -> None:
        """Note the end of what a unit runs; the first unit of those that run it together speaks for all."""
        running, self.running[unit] = self.running[unit], None
        assert running is not None
        op, what = running
        if isinstance(what, Pass):
            if unit == self.crews.crews[self.crews.crew_of[unit]][0]:
                self.passed(what, now)
        elif op.kind is Kind.ENCODE:
            if unit == what.units[0]:
                self.was_encoded(what, now)
        else:
            self.held[unit] -= what.kept

    def passed(self, one: Pass, now: int) -> None:
        self.left[one.step.crew] -= 1
        if one.op.kind is Kind.BACKWARD and not one.goes_back:
            return
        one.step.done[one.op.index] = now
        for crew in one.step.wakes:
            self.wake(self.crews.crews[crew], now)
        if one.goes_back:
            self.unpassed[one.op.index] -= 1
            if not self.unpassed[one.op.index] and self.encoded[one.op.index]:
                self.return_rows(one.op.index, now)

    def wake(self, units: Sequence[int], at: int) -> None:
        for unit in units:
            if self.running[unit] is None:
                heappush(self.events, (at, -unit))

    def was_encoded(self, batch: TimedEncoderBatch, now: int) -> None:
        if batch.learns:
            self.unreturned[batch.back.index] = len(batch.microbatches)
        for m in batch.microbatches:
            self.unencoded[m] -= 1
            if batch.learns:
                self.encoded[m].append(batch)
        way = self.boundary
        while self.next_shipped < len(self.unencoded) and not self.unencoded[self.next_shipped]:
            m, self.next_shipped = self.next_shipped, self.next_shipped + 1
            if way.ship_ns[m] >= 0:
                self.ships_end = way.shipped[m] = max(now, self.ships_end) + way.ship_ns[m]
                for crew in way.entered:
                    self.wake(self.crews.crews[crew], self.ships_end)

    def return_rows(self, m: int, now: int) -> None:
        self.returns_end = max(now, self.returns_end) + self.boundary.ship_ns[m]
        for batch in self.encoded[m]:
            self.unreturned[batch.back.index] -= 1
            if self.unreturned[batch.back.index]:
                continue
            entry = self.returns_end, batch
            if len(batch.units) > 1:
                self.barriers_back.append(entry)
                self.wake(batch.units, self.returns_end)
            else:
                (self.later if batch.is_long else self.back)[batch.units[0]].append(entry)
                self.wake(batch.units, self.returns_end)
