"""Plans that a node makes once: whichever rank comes to a step first plans it, the others of its domain read.

A plan is the same on all ranks of a domain. In a domain of 256 ranks it takes 0.4 to 1.6 s of Python; to read
it, and to check one's own memory, takes 0.07 s. What is read was verified and hashed by who made it, and the
digests of all ranks are compared as always. So that a policy that plans otherwise on some rank is noticed
within a node, too, each rank makes its first plan by itself.
"""

import hmac
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from dataloader.node_cache import NodeCache
from omni.planning.run_spec import RunSpec

MOST_BYTES = 256_000_000  # of plans on a node, those included that runs have left that were killed
_SIGNED = 32  # bytes of a signature
_SCHEMA = pa.schema([pa.field("plan", pa.large_binary(), nullable=False)])
KEPT = 8  # of the plans that a rank has made: no other rank of its domain is so many steps behind


@dataclass(frozen=True)
class NodePlans:
    """Plans in the folder of `cache`, of those who plan the same `run`: its name stands for all that plans
    depend on beside a step, where it begins, the domain and the cost table. The last few that this rank has
    `made` stay there. What is read was signed with the `secret` of the run: a pickle of a stranger, who can
    write to the folder above, would run what it likes.
    """

    cache: NodeCache
    run: str
    secret: bytes
    made: deque[tuple[object, ...]] = field(default_factory=deque)

    def plan(self, key: tuple[object, ...], make: Callable[[], bytes]) -> bytes:
        """Return the pickled plan of a key: what `make` returns, if no rank has made it.

        A rank waits for one that makes it as long as that lives, two minutes at most; then it makes it, too.

        Raises:
            Exception: what `make` raises. Others are not told of it, and make the plan themselves.
        """
        own = (self.run, *key)

        def table() -> pa.Table:
            content = make()
            self.made.append(own)
            return pa.table([[self._signature(own, content) + content]], _SCHEMA)

        found = self.cache.table(own, table)
        while len(self.made) > KEPT:
            self.cache.drop(self.made.popleft())
        signed: bytes = b"".join(found["plan"].to_pylist()) if found.schema == _SCHEMA else b""
        signature, plan = signed[:_SIGNED], signed[_SIGNED:]
        if hmac.compare_digest(signature, self._signature(own, plan)):
            return plan
        self.cache.tell(PermissionError("a plan there is none of this run's ranks: others write to it"))
        return make()

    def _signature(self, key: tuple[object, ...], plan: bytes) -> bytes:
        return hmac.digest(self.secret, repr(key).encode() + plan, "sha256")


def node_plans(
    spec: RunSpec, rank: int, node: range, secret: bytes, start: int, cache: NodeCache
) -> NodePlans | None:
    """Return the plans that a rank shares with others of its `node` that are of its domain; None if there are
    none. The `secret` is that of a launch, and no other's; `start` says how often it was started before.
    """
    own = spec.arrangement.domain(rank)
    if not any(spec.arrangement.domain(each) == own for each in node if each != rank):
        return None
    of = repr((start, spec.arrangement.world, spec.config))
    return NodePlans(cache, hmac.digest(secret, of.encode(), "sha256").hex(), secret)
