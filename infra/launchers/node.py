"""One node of a job, as srun or Ray starts it: `python -m infra.launchers.node … RUN_FOLDER/config.yaml`.

srun gives all nodes the same arguments: which node this is comes from `--node`, else from Slurm.
"""

import argparse
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from infra.agent import run
from infra.launch import MISTAKE, environment_of
from infra.launchers.job import Job, agent_arguments
from infra.lineage import end_with_parent
from parallel.handshake import secret_of_run

RESOLVE_S = 10.0  # for the name of the first node: a container's network may come up after it


def main(arguments: Sequence[str]) -> int:
    """Run the agent of this node and return its exit code."""
    end_with_parent()
    given = _parse(arguments)
    folder = given.config.absolute().parent
    job = Job(0, folder.name, folder, given.nodes, given.ranks, given.max_restarts)
    node = int(os.environ["SLURM_NODEID"]) if given.node is None else given.node
    address = os.environ.get("OMNI_NODE_ADDRESS") or None
    if given.nodes > 1 and (problem := _unknown(given.head)) is not None:
        print(
            f"agent: error: the name of the first node, {given.head}, does not resolve here ({problem}): "
            f"set OMNI_HEAD to its address where you submit, and OMNI_NODE_ADDRESS on each node to its own",
            file=sys.stderr,
        )
        return MISTAKE
    secret = secret_of_run().hex() if given.nodes > 1 else None
    environment = environment_of(given.ranks, given.config, {}, given.launch, secret)
    os.environ.clear()
    os.environ.update(environment)
    return run(agent_arguments(job, node, given.head, given.port, given.launch, address))


def _unknown(host: str) -> str | None:
    """Why a name does not resolve in RESOLVE_S seconds; None if it does."""
    until = time.monotonic() + RESOLVE_S
    while True:
        try:
            socket.getaddrinfo(host, None)
            return None
        except OSError as error:
            if time.monotonic() >= until:
                return str(error)
            time.sleep(1)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m infra.launchers.node", description=__doc__)
    parser.add_argument("config", type=Path, help="config.yaml of the run folder")
    parser.add_argument("--nodes", type=int, required=True, help="nodes of the job")
    parser.add_argument("--ranks", type=int, required=True, help="ranks of each node")
    parser.add_argument("--node", type=int, help="the number of this one; SLURM_NODEID unless given")
    parser.add_argument("--head", required=True, metavar="HOST", help="where all nodes reach node 0")
    parser.add_argument("--port", type=int, required=True, help="a free port of node 0")
    parser.add_argument(
        "--launch", required=True, metavar="ID", help="tells this start of the job from others"
    )
    parser.add_argument("--max-restarts", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(f"error: {error}")
