"""A step of an encoder whose items are shared among ranks by each policy: measured on gloo ranks.

    python benchmarks/sequence_sharding.py [--ranks 2] [--repetitions 9]

Four transformer layers run forward and backward over a heavy-tailed batch of packed items, one thread a rank,
under the five policies of `encoder_sp`, alternating in one run. Cuts, tiles and exchanges are those of
training: the policy divides the items by the cost table of `cluster=cpu`, and attention exchanges what its
tiles need. Outputs are compared with those of one rank before anything is timed.

With 2 ranks the step time is that of the slower rank. With more ranks than cores a rank's waiting is
another's computing, so the figure to read is the CPU time of the slowest rank. Bytes are those that leave a
rank in all layers, forward and backward.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from omni.compose import compose_config
from omni.models.encoders.vit import ViTConfig, ViTEncoder
from omni.models.layer_sizes import encoder_layers
from omni.models.layers import layer_submodules, transformer_config
from omni.planning.clusters import cluster_of
from omni.planning.sharing import Sharing
from parallel.costs import table_from_work
from parallel.megatron import ProcessGroupCollection, TransformerBlock, model_parallel_cuda_manual_seed
from parallel.packed import PackedTokens, Sharding
from parallel.policies import SharingPolicy, make_pool
from parallel.policy import find, registered
from parallel.schemes import sequence_cost
from parallel.sequence import SequenceLayout
from parallel.tile_plan import moved_elements
from parallel.tiles import AttentionShape

POLICIES = {
    name: policy
    for name in registered(SharingPolicy.group)
    if not (policy := find(SharingPolicy, name, "policy")).within_replica
}
ENCODER = ViTEncoder(ViTConfig(layers=4, hidden=128, heads=8, ffn=512, max_side=4096))
CPU = cluster_of(compose_config(["cluster.op_overhead_ns=0"]).cluster, "fp32")
FP32 = 4
EXTRA_STEPS = 2
LONGEST = 4096  # tokens


def heavy_tailed(num_items: int, seed: int) -> list[int]:
    """Tokens of items: most are small; with the default seed one is over half of the batch."""
    drawn = np.random.default_rng(seed).lognormal(4.5, 1.3, num_items)
    return [int(4 * max(1, round(min(tokens, LONGEST) / 4))) for tokens in drawn]


def sharing_of(policy: str, num_ranks: int) -> Sharing:
    """The policy over a pool of `num_ranks`, with the costs of this encoder on CPU cores."""
    attention = ENCODER.attention()
    width = ENCODER.config.hidden
    table = table_from_work({"image": ENCODER.work(width, FP32)}, CPU, width * FP32)
    shape = AttentionShape(attention.heads, attention.kv_heads, attention.causal)
    cost = sequence_cost(table, "image", shape, attention.head_dim * FP32, CPU.links.inside)
    return Sharing(POLICIES[policy], make_pool(cost, num_ranks, ENCODER.unit), num_ranks)


def pack(layout: SequenceLayout, sharing: Sharing, rank: int) -> PackedTokens:
    """What attention on `rank` needs to know; a rank without tokens gets empty ones."""
    tail = 0 if layout.local_tokens(rank) else ENCODER.unit
    tokens = layout.local_tokens(rank) + tail
    positions = torch.zeros(tokens, 2, dtype=torch.long)
    sharding = Sharding(layout, sharing.tiles(layout), rank, tail)
    return ENCODER.pack(sharding, positions, torch.float32, torch.device("cpu"))


def build(pool: dist.ProcessGroup, alone: dist.ProcessGroup) -> TransformerBlock:
    """The layers, with the same weights on every rank."""
    c = ENCODER.config
    config = transformer_config(encoder_layers(c), torch.float32)
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = groups.pp = groups.tp_cp = alone
    groups.pool = pool
    model_parallel_cuda_manual_seed(0, tp_rank=0, ep_rank=0, etp_rank=0)
    specs = layer_submodules(c.layers, c.norm, causal=False)
    block = TransformerBlock(config, specs, post_layer_norm=False, pg_collection=groups)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.8 / parameter.shape[1] ** 0.5, generator=generator)
            elif "norm" not in name:
                parameter.zero_()
    return block


def rows_of(layout: SequenceLayout, rank: int, whole: torch.Tensor) -> torch.Tensor:
    """The tokens of `rank` out of those of the whole batch [T, D]."""
    parts = [whole[i.start : i.start + i.length] for i in layout.intervals() if i.rank == rank]
    return torch.cat(parts) if parts else whole.new_zeros(ENCODER.unit, whole.shape[1])


def step(block: TransformerBlock, hidden: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
    """Forward and backward; returns the output [T, D]."""
    hidden = hidden.requires_grad_()
    out = block(hidden.unsqueeze(1), None, packed_seq_params=packed).squeeze(1)
    out.square().sum().backward()
    return out.detach()


def measure(
    rank: int, num_ranks: int, store: str, lengths: list[int], repetitions: int, results: Any
) -> None:
    """Run all policies in turn; every time begins at a barrier."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    alone = [dist.new_group([r]) for r in range(num_ranks)][rank]
    world = dist.group.WORLD
    assert world is not None
    block = build(world, alone)
    whole = torch.randn(sum(lengths), ENCODER.config.hidden, generator=torch.Generator().manual_seed(1))
    single = SequenceLayout.whole(lengths, [0] * len(lengths), 1)
    expected = step(block, whole.clone(), pack(single, sharing_of("none", 1), 0))
    work: dict[str, tuple[SequenceLayout, PackedTokens]] = {}
    moved = {}
    for policy in POLICIES:
        sharing = sharing_of(policy, num_ranks)
        layout = sharing.layout([lengths])
        packed = pack(layout, sharing, rank)
        assert packed.attention is not None
        work[policy] = layout, packed
        elements = moved_elements(packed.attention.tiles).total
        moved[policy] = 2 * ENCODER.config.layers * elements * FP32
        out = step(block, rows_of(layout, rank, whole), packed)[: layout.local_tokens(rank)]
        mine = rows_of(layout, rank, expected)[: layout.local_tokens(rank)]
        error = float((out - mine).norm() / expected.norm())
        assert error < 1e-5, f"{policy}: outputs differ by {error}"
    times: dict[str, list[tuple[float, float]]] = {policy: [] for policy in POLICIES}
    for repetition in range(repetitions + EXTRA_STEPS):
        for policy in sorted(POLICIES, reverse=repetition % 2 == 0):
            layout, packed = work[policy]
            hidden = rows_of(layout, rank, whole)
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            step(block, hidden, packed)
            taken = torch.tensor([time.perf_counter() - start, time.process_time() - cpu])
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if repetition >= EXTRA_STEPS:
                times[policy].append((float(taken[0]), float(taken[1])))
    total = torch.tensor([moved[policy] for policy in POLICIES])
    dist.all_reduce(total)
    degrees = {p: max(sum(s.length > 0 for s in shards) for shards in work[p][0].shards) for p in POLICIES}
    dist.destroy_process_group()
    if rank == 0:
        results.put((times, dict(zip(POLICIES, total.tolist(), strict=True)), degrees))


def report(
    times: dict[str, list[tuple[float, float]]],
    moved: dict[str, int],
    degrees: dict[str, int],
    num_ranks: int,
) -> None:
    """Print medians and quartiles, and ratios to `none` taken pair by pair."""
    column = 0 if num_ranks == 2 else 1
    what = "step of the slower rank" if num_ranks == 2 else "CPU time of the slowest rank"
    print(f"{'policy':14}{'most ranks':>11}{'MB moved':>10}  {what} ms, and over none (quartiles)")
    for policy in POLICIES:
        own = [pair[column] for pair in times[policy]]
        ratios = [a / b[column] for a, b in zip(own, times["none"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{policy:14}{degrees[policy]:11}{moved[policy] / 1e6:10.2f}  "
            f"{statistics.median(own) * 1e3:8.1f}   {middle:.2f} ({low:.2f} to {high:.2f})"
        )


def on_ranks(num_ranks: int, target: Callable[..., None], *arguments: Any) -> Any:
    """Run `target` on gloo ranks of this machine; return what rank 0 puts in its queue."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=target, args=(rank, num_ranks, store, *arguments, results), daemon=True)
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        answer = results.get(timeout=600)
        for process in ranks:
            process.join()
    return answer


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--items", type=int, default=24)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--seed", type=int, default=3)
    options = parser.parse_args(arguments)
    lengths = heavy_tailed(options.items, options.seed)
    print(f"{options.ranks} gloo ranks, one thread each; {len(lengths)} items, {sum(lengths)} tokens, "
          f"the longest {max(lengths)}; {options.repetitions} repetitions, alternating")  # fmt: skip
    times, moved, degrees = on_ranks(options.ranks, measure, lengths, options.repetitions)
    report(times, moved, degrees, options.ranks)


if __name__ == "__main__":
    main()
