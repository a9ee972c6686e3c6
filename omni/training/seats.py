"""Which of the ranks that an agent has started train, and under which layout.

After a restart there may be fewer ranks than before, or more. Each works out by itself, from the
configuration and how many they are, how many of them some layout takes; these have a seat, numbered in their
order, and the others stand by until the run ends or they are restarted. What a run trains on does not depend
on any of it.
"""

import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from infra.run_folder import RunFolder
from omni.config import Config, ConfigError
from omni.planning.choice import reopened
from omni.planning.layouts import check_zero, resolve_layout
from parallel.layout import LayoutError

_SLOW = "omni/slow"
_ENDED = "omni/ended"
_POLL_S = 1.0


@dataclass(frozen=True)
class Seat:
    """A rank's place in the run: its number among the `world` ranks that train, None if it stands by, and
    the configuration with the layout that they train under.
    """

    config: Config
    rank: int | None
    world: int


def fitting(config: Config, most: int) -> tuple[Config, int]:
    """Return the configuration with the layout that takes the most of `most` ranks, and how many these are.
    Of layouts that take as many, the run's own comes before those of launch.layouts, which are in order.

    Raises:
        LayoutError: that of the run's own layout, if it takes not all and there are no others, or if none
            takes any.
    """
    own = _misfit(config, most)
    if own is None:
        return config, most
    for world in range(most, 0, -1) if config.launch.layouts else ():
        for sizes in (config.layout.llm, *config.launch.layouts):
            candidate = replace(config, layout=replace(config.layout, llm=sizes))
            if _misfit(candidate, world) is None:
                return candidate, world
    raise own


def _misfit(config: Config, world: int) -> LayoutError | None:
    """Why the layout of a configuration does not fit so many ranks, None if it does. What was chosen for
    others is chosen again.
    """
    config = reopened(config, world)
    try:
        check_zero(resolve_layout(config.layout, config.placement, tuple(config.model.encoders), world))
    except LayoutError as error:
        return error
    return None


def seated(config: Config, number: int, present: Sequence[int]) -> Seat:
    """Seat rank `number` of those that are `present`, in their order."""
    chosen, world = fitting(config, len(present))
    at = present.index(number) if number in present else world
    return Seat(chosen, at if at < world else None, world)


def find_seat(config: Config, folder: RunFolder) -> Seat:
    """Seat this process's rank, as its agent describes it. All ranks that agents have started call it.

    Ranks that were slow are left out if that is asked for and some layout fits the others.

    Raises:
        LayoutError: if no layout fits.
        ConfigError: if nodes have unequal numbers of ranks; or if ranks that were slow are to be left out,
            and torchrun's own agent started this one.
    """
    number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _check_nodes(world)
    if config.health.exclude_slow:
        kept = _not_slow(number, world, place() in read_slow(folder), _store(config))
        try:
            return seated(config, number, kept)
        except LayoutError as error:
            if number == 0 and len(kept) < world:
                print(f"note: ranks that were slow are not left out: {error}", file=sys.stderr, flush=True)
    return seated(config, number, range(world))


def _check_nodes(world: int) -> None:
    """Refuse nodes with unequal numbers of ranks: each rank counts on others' nodes being as its own."""
    own = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", world // own))
    if nodes * own != world:
        raise ConfigError(
            f"GROUP_WORLD_SIZE={nodes}, LOCAL_WORLD_SIZE={own}, WORLD_SIZE={world}: {nodes} nodes with as "
            f"many ranks as {socket.gethostname()} has would have {nodes * own}: start the agents of all "
            f"nodes with the same --nproc-per-node"
        )


def _not_slow(number: int, world: int, slow: bool, store: TCPStore) -> list[int]:
    """Ranks that were not slow: each says so of itself, and the first tells all."""
    store.set(f"{_SLOW}/{number}", str(int(slow)))
    if number == 0:
        said = store.multi_get([f"{_SLOW}/{rank}" for rank in range(world)])
        store.set(_SLOW, b"".join(said).decode())
    return [rank for rank, said in enumerate(store.get(_SLOW).decode()) if said == "0"]


def stand_by(seat: Seat) -> None:
    """Wait for the end of the run; a restart ends this process."""
    rank = os.environ["RANK"]
    print(f"rank {rank} on {socket.gethostname()} stands by: {seat.world} ranks train", flush=True)
    store = _store(seat.config)
    while not store.check([_ENDED]):
        time.sleep(_POLL_S)


def end_standing_by(seat: Seat) -> None:
    """Tell those who stand by that the run has ended."""
    if seat.world < int(os.environ["WORLD_SIZE"]):
        _store(seat.config).set(_ENDED, "")


def _store(config: Config) -> TCPStore:
    """The store at which workers meet: their agent holds it."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ConfigError(
            "ranks that stand by need a store that outlives them: start them with `python -m infra.agent`, "
            "which takes the arguments of torchrun"
        )
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=config.train.timeout_s)
    return TCPStore(host, port, is_master=False, timeout=timeout)


# Slow ranks are remembered by where they run: numbers change.


def place() -> str:
    """Where this rank runs: its host, and its number there."""
    return f"{socket.gethostname()}:{os.environ.get('LOCAL_RANK', '0')}"


def _file(folder: RunFolder) -> Path:
    return folder.path / "slow_ranks.txt"


def read_slow(folder: RunFolder) -> set[str]:
    """Return the places of ranks that were named as slow; a user may edit or delete the file."""
    file = _file(folder)
    return set(file.read_text().split()) if file.exists() else set()


def remember_slow(folder: RunFolder) -> None:
    """Note that this rank was slow, once."""
    if place() not in read_slow(folder):
        with _file(folder).open("a") as file:
            file.write(place() + "\n")
