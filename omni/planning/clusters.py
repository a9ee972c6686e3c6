"""From the keys of `cluster` to what ranks and links reach in the number format of a run."""

from omni.config import ClusterConfig, ConfigError
from ops.device import device_type, precision_of
from ops.names import LOWER
from parallel.cluster import Cluster, Link, Links


def cluster_of(config: ClusterConfig, precision: str) -> Cluster:
    """Return what the ranks and links of a cluster reach in a run of a precision, which is
    `train.precision`.

    Raises:
        ConfigError: naming the key, the value and the remedy, if the cluster has no rate for it.
    """
    own, shares = precision_of(precision), config.efficiency
    plain = "bf16" if own in LOWER else own

    def link(bytes_per_s: int, latency_ns: int, share: float) -> Link:
        return Link(latency_ns, max(1, int(bytes_per_s * share)))

    across = link(config.link_bytes_per_s, config.link_latency_ns, shares.link)
    beyond = None
    if config.ranks_per_rail is not None:
        latency_ns = config.far_link_latency_ns
        if latency_ns is None:
            latency_ns = config.link_latency_ns
        beyond = link(config.far_link_bytes_per_s or config.link_bytes_per_s, latency_ns, shares.link)
    inside = link(config.node_link_bytes_per_s, config.node_link_latency_ns, shares.node_link)
    host = config.host_link_bytes_per_s
    peak, plain_peak = _of(config, "flops", own), _of(config, "flops", plain)
    return Cluster(
        name=config.name,
        flops=int(peak),
        products=max(1, int(peak * _of(config, "efficiency.products", own))),
        plain_products=max(1, int(plain_peak * _of(config, "efficiency.products", plain))),
        attention=max(1, int(plain_peak * shares.attention)),
        attention_backward=max(1, int(plain_peak * shares.attention_backward)),
        moved_per_s=max(1, int(config.memory_bytes_per_s * shares.memory)),
        links=Links(inside, across, beyond),
        ranks_per_node=config.ranks_per_node,
        ranks_per_rail=config.ranks_per_rail,
        op_overhead_ns=config.op_overhead_ns,
        launch_ns=config.launch_ns,
        dispatch_ns=config.dispatch_ns,
        issue_ns=config.issue_ns,
        queues=config.queues if _describes_device(config) else "one",
        memory_bytes=config.memory_bytes,
        host_bytes=config.host_memory_bytes,
        host_per_s=None if host is None else max(1, int(host * shares.host_link)),
    )


def _of(config: ClusterConfig, key: str, precision: str) -> float:
    """The figure of a precision, of the peak's or of the products' table."""
    table = config.flops if key == "flops" else config.efficiency.products
    if precision not in table:
        raise ConfigError(
            f"cluster.{key} of {config.name} has no {precision}, which train.precision asks for: there is "
            f"{', '.join(table) or 'nothing'}; set train.precision to one of these, set "
            f"cluster.{key}.{precision}, or choose a cluster that has it"
        )
    return table[precision]


def _describes_device(config: ClusterConfig) -> bool:
    """Whether a cluster's queues may be those of this machine: a CPU's say nothing of GPUs, where one queue
    is safe until several GPUs have shown that communicators never block each other.
    """
    return config.device == device_type() or device_type() == "cpu"
