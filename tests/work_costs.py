"""Costs of work and clusters in round numbers, for tests."""

from typing import Any

from parallel.cluster import Cluster, Link, Links
from parallel.costs import WorkCost
from parallel.laws import Law, Laws


def work_cost(
    token_fs: int, square_fs: int, fixed_ns: int, times: int = 2, weight_fs: int | None = None, **more: Any
) -> WorkCost:
    """Passes whose backward takes `times` a forward; the gradients of weights take `weight_fs` of that, a
    forward's tokens unless given.
    """
    of_weights = token_fs if weight_fs is None else weight_fs
    forward = Law(token_fs, square_fs, fixed_ns)
    back = Law(times * token_fs - of_weights, times * square_fs, (times - 1) * fixed_ns)
    return WorkCost(Laws(forward, back, Law(of_weights, 0, fixed_ns)), **more)


def even_cluster(name: str, flops: int, share: float, **figures: Any) -> Cluster:
    """A cluster on which all arithmetic reaches the same share of the peak."""
    rate = int(flops * share)
    link = Link(100_000, 2 * 10**9)
    plain: dict[str, Any] = {"moved_per_s": 10**10, "links": Links(link, link), "ranks_per_node": 8}
    return Cluster(
        name=name,
        flops=flops,
        products=rate,
        plain_products=rate,
        attention=rate,
        attention_backward=rate,
        **plain | figures,
    )
