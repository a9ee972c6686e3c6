"""The nodes of a job on Ray: on each an actor, in a bundle of its placement group, and as its child an agent.

Actors only start the agents and say how they are. An agent ends with its actor, however that ends, and ranks
end with their agent; Ray ends the actors of a launcher that has ended.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.environment import WORKERS_GRACE_S
from infra.launch import AGENT_MARGIN_S
from infra.launchers.job import Job
from infra.launchers.script import LAST_TASKS_S, NODE
from infra.lineage import STARTED_BY
from parallel.handshake import SECRET, new_secret

START_S = 300.0  # for all actors to have started their agents
KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True)
class RayNeeds:
    """What jobs ask of Ray: a node has `cpus_per_rank` CPUs and, with `gpus`, a GPU for each of its ranks.

    Agents run under `python`. A job that finds no room in `room_s` seconds in which no other job of the sweep
    has any is given up. One that loses a node is begun again if `requeue`.
    """

    python: str
    gpus: bool
    cpus_per_rank: int
    room_s: int
    requeue: bool

    def bundle(self, job: Job) -> dict[str, float]:
        """Return what a node of a job takes, by Ray's names."""
        gpus = {"GPU": float(job.ranks_per_node)} if self.gpus else {}
        return {"CPU": float(job.ranks_per_node * self.cpus_per_rank), **gpus}


def node_command(job: Job, python: str, node: int, head: tuple[str, int], launch: str) -> list[str]:
    """Return the command of the agent of a node; all reach node 0 at `head`, host and port."""
    address, port = head
    shape = ["--nodes", str(job.nodes), "--ranks", str(job.ranks_per_node), "--node", str(node)]
    meet = ["--head", address, "--port", str(port), "--launch", launch]
    return [python, "-m", NODE, *shape, *meet, "--max-restarts", str(job.max_restarts), str(job.config)]


def output_of(job: Job, node: int) -> Path:
    """Return the file for what a node prints: several machines do not append to one."""
    return job.output if node == 0 else job.output.with_name(f"output.{node}.log")


def environment(job: Job, ours: Mapping[str, str], cpus_per_rank: int) -> dict[str, str]:
    """Return the environment of agents: that of the launcher, as Slurm passes it on, not that of Ray."""
    kept = {name: value for name, value in ours.items() if not name.startswith("RAY_")}
    return {"OMP_NUM_THREADS": str(cpus_per_rank), **kept, **job.env, "PYTHONSAFEPATH": "1"}


class Nodes:
    """The nodes that were given to a job, from the request for actors to the end of all agents.

    `codes` are the agents' exit codes by node, in the order in which they ended. `lost` says which node is
    gone, be it its actor or its machine, and `problem` what else went wrong. Neither leaves the others
    anything to do: the caller kills them.
    """

    def __init__(self, ray: Any, group: Any, job: Job, needs: RayNeeds, launch: str) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray, self._job, self._needs, self._launch = ray, job, needs, launch
        actor, bundle = ray.remote(_actor_class()), needs.bundle(job)
        takes = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
        self._actors = []
        for node in range(job.nodes):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
            self._actors.append(actor.options(scheduling_strategy=place, **takes).remote())
        self._meeting: Any = self._actors[0].meet.remote()  # None once it is answered
        self._asked: dict[int, Any] = {}  # by node: what its actor was asked last
        self._waits = set(range(job.nodes))  # for their agents to be started
        self._kill_at = time.monotonic() + START_S
        self._stopping = False
        self.codes: dict[int, int] = {}
        self.lost: int | None = None
        self.problem = ""

    @property
    def up(self) -> bool:
        """Whether all agents have been started."""
        return not self._waits

    @property
    def ended(self) -> bool:
        """Whether all agents have ended."""
        return len(self.codes) == len(self._actors)

    @property
    def overdue(self) -> bool:
        """Whether the time is over that what is left had: to start, after a stop, or after another's end."""
        return time.monotonic() > self._kill_at

    def hear(self) -> None:
        """Take in what actors have answered, and ask again. Never waits."""
        if self._meeting is not None:
            answered, head = self._answer(0, self._meeting)
            if answered:
                self._meeting = None
                self._start_agents(head)
        for node, asked in list(self._asked.items()):
            answered, code = self._answer(node, asked)
            if answered:
                self._took(node, code)
        if self.overdue and not (self.up or self._stopping):
            self.problem = f"Ray did not start an actor on each of its nodes in {START_S:.0f} s"

    def stop(self) -> None:
        """Have ranks save a checkpoint and leave; end all at once if none has begun."""
        if self._meeting is not None:
            self.kill()
        elif not self._stopping:
            self._stopping = True
            for actor in self._actors:
                actor.stop.remote()
            grace_s = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", WORKERS_GRACE_S))
            self._kill_at = time.monotonic() + grace_s + AGENT_MARGIN_S

    def kill(self) -> None:
        """End all that is left, at once."""
        for node, actor in enumerate(self._actors):
            self._ray.kill(actor)
            self.codes.setdefault(node, KILLED)

    def _answer(self, node: int, asked: Any) -> tuple[bool, Any]:
        """Whether a node has answered a question, and what."""
        if not self._ray.wait([asked], timeout=0)[0]:
            return False, None
        try:
            return True, self._ray.get(asked)
        except self._ray.exceptions.RayActorError:
            self.lost = node
        except self._ray.exceptions.RayTaskError as error:
            self.problem = f"node {node} cannot start its agent: {error.cause}"
        return False, None

    def _start_agents(self, head: tuple[str, int]) -> None:
        env = environment(self._job, os.environ, self._needs.cpus_per_rank) | {SECRET: new_secret()}
        for node, actor in enumerate(self._actors):
            command = node_command(self._job, self._needs.python, node, head, self._launch)
            output = str(output_of(self._job, node))
            self._asked[node] = actor.start.remote(command, env, os.getcwd(), output, self._needs.gpus)

    def _took(self, node: int, code: int | None) -> None:
        """Note that the agent of a node ran when it was asked, or had ended with `code`."""
        self._waits.discard(node)
        if code is None:
            self._asked[node] = self._actors[node].poll.remote()
        else:
            del self._asked[node]
            if not self.codes:
                self._kill_at = min(self._kill_at, time.monotonic() + LAST_TASKS_S)
            self.codes[node] = code
        if self.up and not (self.codes or self._stopping):
            self._kill_at = float("inf")


def _actor_class() -> type:
    """Return the class of the actors. It is made in a function, so that Ray sends all of it: nodes import
    nothing of ours to start one.
    """

    class Node:
        """Methods are short and run in one thread, which stays: an agent ends with the one that starts it."""

        def __init__(self) -> None:
            self.agent: subprocess.Popen[bytes] | None = None

        def meet(self) -> tuple[str, int]:
            """Return an address of this node, and a port that is free there."""
            import ray

            with socket.socket() as probe:
                probe.bind(("", 0))
                return ray.util.get_node_ip_address(), probe.getsockname()[1]

        def start(self, command: list[str], env: dict[str, str], cwd: str, output: str, gpus: bool) -> None:
            """Start the agent, with the GPUs that Ray gave this actor."""
            import ray

            own = {"OMNI_NODE_ADDRESS": ray.util.get_node_ip_address(), STARTED_BY: str(os.getpid())}
            if gpus:
                own["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
            with open(output, "ab") as file:
                self.agent = subprocess.Popen(
                    command, env={**env, **own}, cwd=cwd, stdout=file, stderr=file, start_new_session=True
                )

        def poll(self) -> int | None:
            """Return the agent's exit code, None while it runs."""
            assert self.agent is not None
            code = self.agent.poll()
            return 128 - code if code is not None and code < 0 else code

        def stop(self) -> None:
            """Have the ranks of this node save a checkpoint and leave."""
            assert self.agent is not None
            self.agent.terminate()

    return Node
