"""What a step launches on a GPU, what its memory-bound operators move, and where its host waits: counted.

    python benchmarks/gpu_counts.py  # about a minute of CPU
    python benchmarks/gpu_counts.py --quick  # 34 s: 16 experts for 64, without the whole step of the 1B

No GPU is needed, and nothing is timed. Ranks are rehearsed on fake CUDA (docs/rehearsal.md), in bf16, without
recomputation. A layer is what one more of it adds to a pass. An operator counts as the kernels that it
launches (omni/rehearsal/kernels.py); one that is not known there fails. Bytes of memory-bound operators,
whole operands and results, are compared with the least: a sum with the norm that follows, rotation and
activation each read and write their tensors once; biases, and sums of weight gradients, are in the products.
The last line is JSON; the exit code is 1 where a goal is missed.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from omni.rehearsal.noop_guard import install

if TYPE_CHECKING:  # what imports torch comes after the device
    from omni.planning.run_spec import RunSpec
    from omni.rehearsal.launches import Launches
    from omni.rehearsal.rehearse import Rehearsal
    from pipeline.plan import StepPlan

Figures = dict[str, float]

GOALS: Mapping[str, float] = {
    "LLM layer, forward": 12,
    "LLM layer, backward": 24,
    "more with cp, forward": 10,
    "more with cp, backward": 14,
    "encoder layer, forward": 14,
    "encoder layer, backward": 28,
    "MoE layer of 4 experts, forward": 45,
    "MoE layer of 4 experts, backward": 75,
    "MoE layer of many experts, forward": 45,
    "MoE layer of many experts, backward": 75,
    "bytes by the least, LLM layer of 1B": 1.25,
    "bytes by the least, LLM layer of 8B": 1.25,
    "LLM layer with normed heads, forward": 12,
    "LLM layer with normed heads, backward": 24,
    "bytes by the least, LLM layer with normed heads": 1.25,
    "bytes by the least, LLM layer with gated heads": 1.25,
    "bytes by the least, LLM layer with norms around": 1.25,
    "bytes by the least, encoder layer": 1.25,
    "bytes by the least, loss of 8B": 1.25,
    "memory-bound time by products, 1B": 0.18,
    "waits, dense step": 0,
    "waits, MoE step, ep 1": 0,
    "waits a layer and microbatch, MoE step, ep 2": 1,
    "copies to the device": 1,
}
"""The most that each may be. What has no goal is printed all the same."""

BF16 = 2
DENSE = ("model=llama3_1b_so400m", "launch.ranks=1")
BIG = ("model=llama3_1b_so400m", "model/llm=llama3_8b", "data.step_samples=14")
NORMED = {  # as of Qwen3, Qwen3.5's attention and Gemma 3
    "normed heads": ("model.llm.qk_norm=true",),
    "gated heads": ("model.llm.qk_norm=true", "model.llm.output_gate=true"),
    "norms around": ("model.llm.qk_norm=true", "model.llm.norms=around"),
}
MOE = ("model.llm.moe.topk=2", "model.llm.moe.ffn=2048", "model.llm.moe.dense_layers=0")
FIXED = (
    "~experiment",
    "system=multiplexed",
    "cluster=h100",
    "train.steps=3",
    "train.precision=bf16",
    "data.on_long=truncate",
    "data.tokenizer=bytes",
    "data.microbatch_tokens=16384",
    "data.step_samples=32",
    "model.llm.recompute=none",
    "model.encoders.image.recompute=none",
)


class UnknownOperatorError(RuntimeError):
    """Nobody has said what an operator launches."""


@dataclass(frozen=True)
class Counted:
    """A rank's rehearsed step, and the plan it ran."""

    spec: "RunSpec"
    plan: "StepPlan"
    rehearsal: "Rehearsal"

    def each(self, phase: str) -> "Launches":
        """What a pass launches, of passes that are alike; bytes and FLOPs are of all of them together."""
        found = self.rehearsal.launches[phase]
        assert not any(count % found.ops for count in found.launches.values()), f"{phase}: passes differ"
        return replace(found, launches={kind: count // found.ops for kind, count in found.launches.items()})

    @property
    def tokens(self) -> int:
        """Tokens that the passes of this rank have, of all microbatches."""
        domain, arrangement, rank = self.plan.domain, self.spec.arrangement, self.rehearsal.rank
        cp_rank = domain.cp_rank(arrangement.global_ranks(arrangement.domain(rank)).index(rank))
        return sum(batch.layout.padded_tokens(cp_rank, domain.tp) for batch in domain.microbatches)

    @property
    def encoded(self) -> int:
        """Tokens that this rank encodes."""
        return sum(sum(encoder_batch.layout.lengths) for encoder_batch in self.plan.domain.encoder_batches)

    @property
    def waits(self) -> int:
        """How often the host waits in a step for all that the device was given."""
        from omni.rehearsal.findings import WAITS
        from omni.rehearsal.launches import BEHIND, BESIDE

        beside = {*BESIDE, BEHIND} - {"assemble"}
        findings = self.rehearsal.findings.items()
        return sum(n for found, n in findings if found.kind == WAITS and found.phase not in beside)


def step(*keys: str, rank: int = 0, trace: str = "balanced", layers: int = 1) -> Counted:
    """Rehearse a rank with so many layers of LLM and encoder, or with the model's own for 0.

    Raises:
        UnknownOperatorError: if it is not known what an operator launches.
    """
    import torch

    from omni.commands.plan import plan_of_step
    from omni.compose import compose_config
    from omni.planning.layouts import planned_ranks
    from omni.planning.prepare import prepare_run
    from omni.rehearsal.rehearse import rehearse
    from omni.rehearsal.stand_in_data import use_trace

    sizes = [f"model.llm.layers={layers}", f"model.encoders.image.layers={layers}"] if layers else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = compose_config([*FIXED, *sizes, *keys, f"run.dir={folder / 'run'}"])
        use_trace(config, trace, folder / "trace", 64, tell=lambda note: None)
        spec = prepare_run(config, planned_ranks(config.launch))
        plan = plan_of_step(spec, 1, spec.arrangement.domain(rank))
        rehearsal = rehearse(spec, plan, rank, torch.device("cuda", 0))
    if rehearsal.unknown:
        raise UnknownOperatorError(", ".join(rehearsal.unknown))
    return Counted(spec, plan, rehearsal)


def layer(one: Counted, two: Counted, phase: str) -> "Launches":
    """What a second layer adds to a pass of the same microbatches; its collectives apart."""
    few, many = one.each(phase), two.each(phase)
    added = {kind: count - few.launches.get(kind, 0) for kind, count in many.launches.items()}
    added.pop("collective", None)
    return replace(many, launches=added, bytes=many.bytes - few.bytes, flops=many.flops - few.flops)


def least_bytes(tokens: int, hidden: int, rotated: int, ffn: int, gated: bool) -> tuple[int, int]:
    """Of a layer's forward and backward: two sums with norms, rotated heads, the activation."""
    norms, rotation = 2 * 4 * hidden, 2 * rotated
    forward, backward = (3, 5) if gated else (2, 3)
    both = (norms + rotation + forward * ffn, norms + rotation + backward * ffn)
    return both[0] * tokens * BF16, both[1] * tokens * BF16


def of_llm(name: str, one: Counted, two: Counted) -> Figures:
    """Bytes of a dense layer of an LLM by the least, forward and backward together.

    The backward of a norm of heads reads them once more, and that of a norm behind a half, which is in the
    sum, what the half put out, of which it writes the gradient. Gates are read with what they let through,
    and their gradients written.
    """
    sizes = one.spec.config.model.llm
    head = sizes.head_dim or sizes.hidden // sizes.heads
    rotated = (sizes.heads + sizes.kv_heads) * head
    least = sum(least_bytes(one.tokens, sizes.hidden, rotated, sizes.ffn, True))
    more = rotated * sizes.qk_norm + 2 * 2 * sizes.hidden * (sizes.norms != "before")
    more += (3 + 5) * sizes.heads * head * sizes.output_gate
    found = sum(layer(one, two, phase).bytes for phase in ("forward", "backward"))
    return {f"bytes by the least, LLM layer {name}": found / (least + more * one.tokens * BF16)}


def normed() -> Figures:
    """Layers of the 1B with more norms than those ahead of its halves."""
    figures: Figures = {}
    for name, keys in NORMED.items():
        one, two = step(*DENSE, *keys), step(*DENSE, *keys, layers=2)
        for way in ("forward", "backward"):
            figures[f"LLM layer with {name}, {way}"] = layer(one, two, way).total
        figures |= of_llm(f"with {name}", one, two)
    return figures


def dense() -> Figures:
    """Layers of the 1B and of its encoder, waits and copies of its step, and what is behind its passes."""
    one, two = step(*DENSE), step(*DENSE, layers=2)
    figures: Figures = {}
    for name, phases in (("LLM", ("forward", "backward")), ("encoder", ("encode", "encode_backward"))):
        for phase, way in zip(phases, ("forward", "backward"), strict=True):
            figures[f"{name} layer, {way}"] = layer(one, two, phase).total
    again = (*DENSE, "model.llm.recompute=selective")
    figures["LLM layer, backward, selective"] = layer(step(*again), step(*again, layers=2), "backward").total
    figures |= of_llm("of 1B", one, two)
    sizes = one.spec.config.model.encoders["image"]
    hidden, ffn = int(sizes["hidden"]), int(sizes["ffn"])
    least = least_bytes(one.encoded, hidden, 2 * hidden, ffn, False)
    found = sum(layer(one, two, phase).bytes for phase in ("encode", "encode_backward"))
    figures["bytes by the least, encoder layer"] = found / sum(least)
    figures["waits, dense step"] = one.waits
    figures["copies to the device"] = sum(
        of.copies for phase, of in one.rehearsal.launches.items() if phase not in ("build", "restore")
    )
    for phase in ("gradients of tied embeddings", "totals", "update"):
        figures[f"launches, {phase}"] = one.rehearsal.launches[phase].total
    updated = sum(one.rehearsal.launches[phase].bytes for phase in ("totals", "update"))
    # Gradient, main weight and two moments in fp32, three of them written too, and the weight in bf16.
    least_update = (4 * 4 + 3 * 4 + BF16) * sum(one.rehearsal.footprint.parameters.values())
    figures["bytes by the least, update"] = updated / least_update
    return figures


def shared(alone: Figures) -> Figures:
    """What sharing every sequence over two ranks adds to a layer, with few and with many sequences."""
    keys = ("model=llama3_1b_so400m", "launch.ranks=2", "layout.llm.cp=2", "llm_sp.policy=all")
    figures = {"more with cp, forward": 0.0, "more with cp, backward": 0.0}
    for samples in (2, 16):
        more = (*keys, f"data.step_samples={samples}")
        one, two = step(*more), step(*more, layers=2)
        for way in ("forward", "backward"):
            added = layer(one, two, way).total - alone[f"LLM layer, {way}"]
            figures[f"more with cp, {way}"] = max(figures[f"more with cp, {way}"], added)
    return figures


def experts(many: int) -> Figures:
    """Layers of 4 and of `many` local experts, and where their host waits."""
    figures: Figures = {}
    for name, number in (("4", 4), ("many", many)):
        keys = (*DENSE, *MOE, f"model.llm.moe.experts={number}")
        one, two = step(*keys), step(*keys, layers=2)
        for way in ("forward", "backward"):
            figures[f"MoE layer of {name} experts, {way}"] = layer(one, two, way).total
        figures["waits, MoE step, ep 1"] = two.waits
    keys = ("model=llama3_1b_so400m", "launch.ranks=2", *MOE, "model.llm.moe.experts=8", "layout.llm.ep=2")
    apart = step(*keys)
    batches = apart.rehearsal.launches["forward"].ops
    figures["waits a layer and microbatch, MoE step, ep 2"] = apart.waits / batches
    return figures


def eight() -> Figures:
    """A layer of the 8B, and what its last stage does beside layers: norm, output and loss."""
    one, two = step(*BIG, "launch.ranks=1"), step(*BIG, "launch.ranks=1", layers=2)
    figures = of_llm("of 8B", one, two)
    last = step(*BIG, "launch.ranks=2", "layout.llm.pp=2", rank=1, layers=2)
    sizes = last.spec.config.model.llm
    added = {way: layer(one, two, way) for way in ("forward", "backward")}
    whole = {way: last.each(way) for way in added}
    logits = (whole["forward"].flops - added["forward"].flops) // (2 * sizes.hidden) * BF16
    for way in added:
        figures[f"loss of 8B, {way}"] = whole[way].total - added[way].total
    moved = sum(whole[way].bytes - added[way].bytes for way in added)
    # Logits are read for the losses and again for their gradient, which is written; one norm beside.
    figures["bytes by the least, loss of 8B"] = moved / (3 * logits + 8 * last.tokens * sizes.hidden * BF16)
    return figures


def whole() -> Figures:
    """The 1B with all layers, a rank of two stages: time of memory-bound operators by that of products."""
    from omni.rehearsal.launches import of_step

    keys = ("model=llama3_1b_so400m", "layout=pp2", "launch.ranks=2", "data.step_samples=128")
    found = step(*keys, layers=0)
    together, cluster = of_step(found.rehearsal.launches), found.spec.cluster
    share = together.memory_s(cluster) / together.products_s(cluster)
    return {"memory-bound time by products, 1B": share}


def main() -> int:
    """Count, print, and return 1 where a goal is missed or an operator is unknown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="with 16 experts where there are 64, and without the whole step of the 1B",
    )
    given = parser.parse_args()
    install()
    figures: Figures = {}
    unknown = ""
    try:
        figures |= dense() | normed()
        figures |= (
            shared(figures) | experts(16 if given.quick else 64) | eight() | ({} if given.quick else whole())
        )
    except UnknownOperatorError as error:
        unknown = str(error)
    missed = [name for name, most in GOALS.items() if figures.get(name, 0) > most]
    for name, figure in figures.items():
        goal = f"{GOALS[name]:8g}" if name in GOALS else ""
        print(f"{name:48} {figure:8.4g} {goal:8} {'missed' if name in missed else ''}".rstrip())
    rounded = {name: round(figure, 3) for name, figure in figures.items()}
    print(json.dumps({"benchmark": "gpu_counts", "figures": rounded, "missed": missed, "unknown": unknown}))
    return int(bool(missed or unknown))


if __name__ == "__main__":
    sys.exit(main())
