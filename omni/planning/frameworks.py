"""Other frameworks, as `omni plan --framework` and benchmarks simulate them: the same lists, other overlap.

Nothing here changes a run: ranks run ours, whose overlap the simulator finds in its op lists. The figures
below that name no source were chosen with all rows of benchmarks/published_throughput.csv in sight.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from omni.config import ConfigError
from parallel.cluster import Cluster
from parallel.costs import Axes, CostTable, of_each
from parallel.overlap import Overlap, overlapped
from parallel.work import FP32, Part

BF16 = 2  # bytes
_VISIBLE = 450  # thousandths of a message that is split: fitted, benchmarks/simulator_error.py


@dataclass(frozen=True)
class Framework:
    """What another framework does otherwise: `overlap`, whose pass is set for a run; its attention kernel
    takes `attention` times ours, and a ring of context parallelism `ring` of an attention more.
    """

    overlap: Overlap
    attention: float = 1.0
    ring: float = 0.0

    def on(self, cluster: Cluster, cp: int) -> Cluster:
        """Return a cluster as the framework uses it, with `cp` ranks that share sequences."""
        times = self.attention * (1 + self.ring * (cp > 1))
        return replace(
            cluster,
            attention=int(cluster.attention / times),
            attention_backward=int(cluster.attention_backward / times),
            queues="per_communicator",
        )


_MEGATRON = Overlap(pass_tokens=0, tensor=_VISIBLE, expert=500, bucket=50, gradient_bytes=BF16)
_TORCHTITAN = Overlap(pass_tokens=0, bucket=50, gradient_bytes=FP32, sharded=True)
# FlashAttention-2 reaches 35 % of a Hopper's peak by itself (Shah et al., 2024, FlashAttention-3, abstract),
# here 32 %: the cluster files' attention, 56 % on an h100, was fitted with this factor.
_FLASH_2 = 1.77
FRAMEWORKS = {
    # Tensor, data and pipeline parallel messages overlapped (its README, "Training Speed and Scalability").
    "megatron": Framework(_MEGATRON),
    # As MegaScale (Jiang et al., 2024, section 6) ran it on A100s: messages of tensor parallelism wait.
    "megatron_2023": Framework(replace(_MEGATRON, tensor=1000)),
    # With attention and feed-forward beside each other half of the messages are left (the same, section 3.1).
    "megascale": Framework(replace(_MEGATRON, tensor=_VISIBLE // 2)),
    "torchtitan": Framework(_TORCHTITAN, attention=_FLASH_2, ring=0.3),
    "torchtitan_async_tp": Framework(replace(_TORCHTITAN, tensor=_VISIBLE), attention=_FLASH_2, ring=0.3),
}


def framework_called(name: str) -> Framework:
    """Return a framework by its name.

    Raises:
        ConfigError: if there is none.
    """
    if name not in FRAMEWORKS:
        raise ConfigError(f"--framework {name}: there are {', '.join(FRAMEWORKS)}; leave it out for ours")
    return FRAMEWORKS[name]


def table_under(
    table: CostTable,
    parts: Mapping[str, Part],
    axes: Mapping[str, Axes],
    framework: Framework,
    pass_tokens: int,
    stages: int,
) -> CostTable:
    """Return a cost table as a framework's steps take, whose passes are over `pass_tokens` tokens of a rank,
    in a pipeline of `stages`: weights that are sharded are gathered once a step if there are several.
    """
    overlap = replace(framework.overlap, pass_tokens=pass_tokens)
    if stages > 1:
        overlap = replace(overlap, sharded=False)
    costs = of_each(parts, axes, lambda name, own: overlapped(table.parts[name], parts[name], own, overlap))
    return replace(table, parts=costs)
