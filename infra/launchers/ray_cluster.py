"""A Ray cluster as a launcher meets it: how it is reached or started, what a job asks of it, what there is.

Ray is an extra of this package and takes a second to import: it is looked for by name, where it is used.
"""

import importlib
import importlib.util
import logging
import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from infra.host_checks import ray_problem
from infra.launchers.job import Job
from parallel.handshake import new_secret

OBJECTS_BYTES = 10**8  # of a cluster of our own: nothing is put into it


class RayError(ValueError):
    """Ray is not installed, or no cluster answers; the message says what to do."""


def check_installed() -> None:
    """Refuse to launch on Ray without Ray.

    Raises:
        RayError: naming the remedy.
    """
    if importlib.util.find_spec("ray") is None:
        raise RayError(
            "hydra/launcher=ray: Ray is not installed here: pip install 'omni-train[ray]' on every node, or "
            "choose another launcher"
        )


@contextmanager
def on_cluster(address: str | None) -> Iterator[Any]:
    """Give the module `ray`, connected inside the block to the cluster at `address`.

    That is HOST:PORT, or `auto` for the one that RAY_ADDRESS or else this machine names; this machine must be
    one of its nodes. None starts a cluster of this machine alone, which listens on its loopback interface,
    obeys nobody else, and ends with the block, or with this process if that is killed. Ray takes SIGTERM for
    itself: handle signals inside. Ray reports nothing of us.

    Raises:
        RayError: if Ray is not installed, or no cluster answers.
    """
    check_installed()
    if address not in (None, "auto") and (problem := ray_problem(str(address))) is not None:
        raise _unanswered(address, problem)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if address is None:
        # Ray runs what it is sent: this cluster's own obey its token alone. Without it, one call still ends a
        # raylet or the GCS (Ray 2.60), so they listen on the loopback interface, as Ray has it where it
        # supports one machine only.
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=new_secret())
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray: Any = importlib.import_module("ray")
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    own = {"address": "local", "include_dashboard": False, "object_store_memory": OBJECTS_BYTES}
    try:
        with _hang_ups_ignored():
            ray.init(**quiet, **(own if address is None else {"address": address}))
    except (OSError, ValueError, RuntimeError) as error:
        raise _unanswered(address, str(error)) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def no_room(job: Job, bundle: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> str:
    """Say what a job asks for and what the `nodes` of the cluster have, free or not."""
    there = Counter(_amounts({name: node.get(name, 0.0) for name in bundle}) for node in nodes)
    listed = "; ".join(f"{count} × {amounts}" for amounts, count in sorted(there.items())) or "none"
    return (
        f"it asks for {job.nodes} × {_amounts(bundle)}, each on a node of its own; nodes there are: {listed}"
    )


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())


def _unanswered(address: str | None, problem: str) -> RayError:
    if address is None:
        return RayError(f"hydra/launcher=ray: a cluster cannot be started here: {problem}")
    return RayError(
        f"hydra.launcher.address={address}: no Ray cluster answers: {problem}: start one (ray start --head), "
        f"or leave the key out for a cluster of this machine alone"
    )


@contextmanager
def _hang_ups_ignored() -> Iterator[None]:
    """Have what is started inside outlive the terminal's hang-up, which is ours to hand on as a stop."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
