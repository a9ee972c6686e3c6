"""Jobs on Ray: each asks for a placement group, runs on its nodes, and lets go of them.

Ray decides when a group finds room. One process, the launcher, looks after all jobs; when it ends, Ray ends
what it has started.
"""

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from infra.launch import MISTAKE, new_launch, noting_signals
from infra.launchers.job import QUEUED_AGAIN, Job
from infra.launchers.local import verdict
from infra.launchers.ray_cluster import no_room
from infra.launchers.ray_nodes import KILLED, Nodes, RayNeeds
from infra.lineage import outlives_parent
from infra.run_folder import write_text

POLL_S = 0.5
MOST_STARTS = 5  # of a job that loses nodes


def job_code(codes: Sequence[int], received: Sequence[int]) -> int:
    """Return the exit code of a job whose agents ended with `codes`, in this order, after signals `received`.

    As for ranks of one machine: a mistake counts before what it led to, a stop that was asked for before how
    ranks took it, the first agent that failed before others.
    """
    if not any(codes):
        return 0
    if MISTAKE in codes:
        return MISTAKE
    return 128 + received[0] if received else next(code for code in codes if code)


def run_on_ray(
    ray: Any, jobs: Sequence[Job], needs: RayNeeds, parent: int, say: Callable[[str], None]
) -> list[int | None]:
    """Run jobs as Ray finds room for them, and return their exit codes, None for one not started.

    What a node prints goes to a file in the run folder. A signal that asks for an end is handed on to the
    agents under way, and no other job starts; so is the end of `parent`, which started this process. A second
    one kills. Needs the main thread.
    """
    with noting_signals() as received:
        queue = [_Queued(ray, job, needs, say) for job in jobs]
        while under_way := [each for each in queue if each.is_open(bool(received))]:
            if not received and outlives_parent(parent):
                received.append(signal.SIGHUP)
            for each in under_way:
                each.advance(received, any(other.nodes for other in queue))
            time.sleep(POLL_S)
        for each in queue:
            each.let_go()
    return [each.code for each in queue]


class _Queued:
    """A job from the request for room to its exit code. It has `nodes` while it runs."""

    def __init__(self, ray: Any, job: Job, needs: RayNeeds, say: Callable[[str], None]) -> None:
        self._ray, self._job, self._needs, self._say = ray, job, needs, say
        self._launch = new_launch()  # of all its starts: they hold the lock of the run folder together
        self._starts = 0
        self._ended = False
        self._told = False  # that all agents of this start are up
        self.code: int | None = None  # if nothing more happens
        self._ask_for_room()

    def is_open(self, stopping: bool) -> bool:
        """Whether the job is still to end, or to begin."""
        return not self._ended and (self.nodes is not None or not stopping)

    def advance(self, received: Sequence[int], others_run: bool) -> None:
        """Begin a job that has found room, hear of one that runs, and end one whose nodes have ended."""
        if self.nodes is None:
            self._look_for_room(others_run)
            return
        self.nodes.hear()
        if self.nodes.up and not self._told:
            self._told = True
            self._say(f"job {self._job.number} started, output in {self._job.output}")
        if received:
            self.nodes.stop()
        if self.nodes.lost is not None or self.nodes.problem or self.nodes.overdue or len(received) > 1:
            self.nodes.kill()
        if self.nodes.ended:
            self._conclude(self.nodes, received)

    def let_go(self) -> None:
        """Give the nodes back, which ends what is left on them; one that waits no longer asks for any."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)

    def _ask_for_room(self) -> None:
        from ray.util.placement_group import placement_group

        self._starts += 1
        self._asked_at = time.monotonic()
        self._told = False
        self.nodes: Nodes | None = None
        bundles = [self._needs.bundle(self._job)] * self._job.nodes
        name = f"{self._job.name} {self._launch[:8]} {self._starts}"  # Ray takes a name once
        self._group = placement_group(bundles, strategy="STRICT_SPREAD", name=name)
        self._room = self._group.ready()

    def _look_for_room(self, others_run: bool) -> None:
        if self._ray.wait([self._room], timeout=0)[0]:
            self._job.exit_code.unlink(missing_ok=True)
            self.nodes = Nodes(self._ray, self._group, self._job, self._needs, self._launch)
        elif others_run:
            self._asked_at = time.monotonic()
        elif time.monotonic() > self._asked_at + self._needs.room_s:
            there = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            found = no_room(self._job, self._needs.bundle(self._job), there)
            self._say(
                f"job {self._job.number}: no room on this Ray cluster in {self._needs.room_s} s: {found}; "
                f"choose fewer launch.ranks, other hydra.launcher.ranks_per_node, cpus_per_rank or gpus, or "
                f"wait longer (room_s)"
            )
            self._end(MISTAKE)

    def _conclude(self, nodes: Nodes, received: Sequence[int]) -> None:
        if nodes.lost is not None or nodes.problem:
            what = nodes.problem or f"node {nodes.lost} is gone"
            self._say(f"job {self._job.number}: {what}")
        self.let_go()
        codes = list(nodes.codes.values())
        again = nodes.lost is not None and self._needs.requeue and MISTAKE not in codes
        if again and not received and self._starts < MOST_STARTS:
            self._say(f"job {self._job.number} is queued again; it goes on after its newest checkpoint")
            self.code = KILLED
            self._note(QUEUED_AGAIN)
            self._ask_for_room()
        else:
            self._end(1 if nodes.problem else job_code(codes, received))

    def _end(self, code: int) -> None:
        self._ended, self.code, self.nodes = True, code, None
        self._note(str(code))
        self._say(f"job {self._job.number} {verdict(code)}")

    def _note(self, code: str) -> None:
        with suppress(OSError):  # a full disk must not end the others
            write_text(self._job.exit_code, f"{code}\n")
