"""Vector clocks: which launch on a device is ordered before which.

A device runs what a stream was given one after the other; what two streams were given, in any order, unless
something orders it. A stream's clock says, for every stream, how many of its launches are over when the next
one of this stream begins. An event takes a copy of a clock; who waits for it takes the greater of both.

The host's threads have clocks, too: what a thread has waited for is over before it launches anything. That
one thread has told another orders nothing: the one may launch long before the device has come to what the
other has launched.

Example: streams 0 and 7.

    launch on 0                     0: {0: 1}
    event on 0, stream 7 waits      7: {0: 1}
    launch on 7                     7: {0: 1, 7: 1}          ordered after the first
    launch on 0                     0: {0: 2}                not ordered with the one on 7
    the host waits for stream 7     host: {0: 1, 7: 1}
    launch on 0                     0: {0: 3, 7: 1}          ordered after all
"""

import threading
from collections import defaultdict
from collections.abc import Hashable, Mapping

Clock = dict[Hashable, int]  # launches that are over, by stream


class Clocks:
    """The clocks of all streams and threads that were heard of."""

    def __init__(self) -> None:
        self._streams: defaultdict[Hashable, Clock] = defaultdict(dict)
        self._threads: defaultdict[int, Clock] = defaultdict(dict)

    def of(self, stream: Hashable) -> Clock:
        """What is over when the next launch of a stream begins. Not to be changed."""
        return self._streams[stream]

    def host(self) -> Clock:
        """What this thread knows to be over. Not to be changed."""
        return self._threads[threading.get_ident()]

    def mark(self, stream: Hashable) -> Clock:
        """What an event that is put on a stream stands for."""
        return dict(self._streams[stream])

    def wait(self, stream: Hashable, clock: Mapping[Hashable, int]) -> None:
        """Have a stream wait for an event."""
        _merge(self._streams[stream], clock)

    def wait_on_host(self, clock: Mapping[Hashable, int]) -> None:
        """Have this thread wait for an event."""
        _merge(self.host(), clock)

    def wait_for_all(self) -> None:
        """Have this thread wait for the whole device."""
        for clock in self._streams.values():
            self.wait_on_host(clock)

    def launch(self, stream: Hashable) -> int:
        """Count a launch of this thread on a stream. Returns its number there."""
        clock = self._streams[stream]
        known = self._threads.get(threading.get_ident())
        if known:
            _merge(clock, known)
        number = clock[stream] = clock.get(stream, 0) + 1
        return number


def _merge(clock: Clock, other: Mapping[Hashable, int]) -> None:
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count
