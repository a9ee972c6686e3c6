"""One training step of this stack against the same model in plain torch, on one thread, in one run.

    python benchmarks/step_overhead.py [--steps 40] [--profile]

Both train a decoder of 4 layers, hidden 256, 8 heads, SwiGLU 704, tied byte vocabulary, on two documents of
512 tokens a step, from the same weights, with AdamW and clipping. The stack goes its whole way: plan, verify,
agree, load, engine, totals, update. The plain model is what one would write by hand: nn.Linear, F.rms_norm,
F.scaled_dot_product_attention, F.cross_entropy, fused AdamW. Steps alternate, so that both see the same
machine; the figure is the median of the ratios of neighbouring steps. The losses must agree, which shows that
the two are the same model.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dataloader.format import Sample
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.planning.prepare import prepare_run
from omni.training.trainer import Trainer

LAYERS, WIDTH, HEADS, FFN, LENGTH, BATCH, VOCABULARY = 4, 256, 8, 704, 512, 2, 264
# A large epsilon keeps Adam from turning rounding noise into updates of full size, so losses stay comparable.
LR, EPS, CLIP, WEIGHT_DECAY = 1e-3, 1e-4, 1.0, 0.1
WARMUP = 5


class Layer(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.Parameter(torch.ones(WIDTH))
        self.norm2 = nn.Parameter(torch.ones(WIDTH))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[B, T, D] → [B, T, D]."""
        b, t, d = x.shape
        h = F.rms_norm(x, (WIDTH,), self.norm1, 1e-5)
        # megatron's order of the fused projection: for each head its query, key and value.
        q, k, v = self.qkv(h).view(b, t, HEADS, 3, d // HEADS).permute(3, 0, 2, 1, 4)
        a = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        gate, up = self.gate_up(F.rms_norm(x, (WIDTH,), self.norm2, 1e-5)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding."""
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class Plain(nn.Module):
    """The model by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.Parameter(torch.ones(WIDTH))
        half = WIDTH // HEADS // 2
        angles = torch.arange(LENGTH)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Mean loss of the targets."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = F.linear(F.rms_norm(x, (WIDTH,), self.norm, 1e-5), self.embedding.weight)
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (losses * mask.flatten()).sum() / mask.sum()

    def copy_weights(self, model: nn.Module) -> None:
        """Take the weights of megatron's GPTModel of the same sizes."""
        source = dict(model.named_parameters())
        pairs = [
            (self.embedding.weight, "embedding.word_embeddings.weight"),
            (self.norm, "decoder.final_layernorm.weight"),
        ]
        for i, layer in enumerate(self.layers):
            prefix = f"decoder.layers.{i}."
            pairs += [
                (layer.norm1, prefix + "input_layernorm.weight"),
                (layer.norm2, prefix + "pre_mlp_layernorm.weight"),
                (layer.qkv.weight, prefix + "self_attention.linear_qkv.weight"),
                (layer.proj.weight, prefix + "self_attention.linear_proj.weight"),
                (layer.gate_up.weight, prefix + "mlp.linear_fc1.weight"),
                (layer.down.weight, prefix + "mlp.linear_fc2.weight"),
            ]
        assert len(pairs) == len(source), sorted(source)
        with torch.no_grad():
            for parameter, name in pairs:
                parameter.copy_(source[name])


def build_documents(path: Path, count: int) -> None:
    """Write text documents that fill a sequence exactly: 511 bytes after the bos."""
    rng = random.Random(0)
    words = ["plan", "verify", "ship", "return", "encode", "forward", "backward", "reduce", "wait"]
    with DatasetWriter(path, ByteTokenizer()) as writer:
        for i in range(count):
            text = " ".join(rng.choices(words, k=200))[: LENGTH - 1]
            writer.add(Sample(id=str(i), text=text))


def make_trainer(folder: Path, steps: int) -> Trainer:
    """The stack on one rank, with the benchmark's model and data."""
    build_documents(folder / "docs", BATCH * steps)
    config = compose_config(
        [
            "~experiment", "system=multiplexed", "+model/llm=tiny", "tracking=jsonl",
            f"model.llm.layers={LAYERS}", f"model.llm.hidden={WIDTH}", f"model.llm.heads={HEADS}",
            f"model.llm.kv_heads={HEADS}", f"model.llm.ffn={FFN}",
            f"+data.sources.docs.path={folder / 'docs'}", f"data.step_samples={BATCH}",
            f"data.microbatch_tokens={BATCH * LENGTH}", f"train.steps={steps}", "train.precision=fp32",
            f"optim.lr={LR}", "optim.schedule=wsd", f"optim.min_lr={LR}", f"optim.clip={CLIP}",
            f"optim.weight_decay={WEIGHT_DECAY}", f"optim.eps={EPS}", f"run.dir={folder / 'run'}",
        ]
    )  # fmt: skip
    return Trainer(prepare_run(config, 1), RunFolder.create(folder / "run"), 0, torch.device("cpu"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--profile", action="store_true", help="also print where each side spends its time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dist.init_process_group("gloo", f"file://{folder / 'store'}", rank=0, world_size=1)
        total = arguments.steps + WARMUP + 2
        trainer = make_trainer(folder, total)
        plain = Plain()
        plain.copy_weights(trainer.rank.stage.virtual_stages[0].model)
        decayed = [p for p in plain.parameters() if p.dim() > 1]
        others = [p for p in plain.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}],
            lr=LR, betas=(0.9, 0.95), eps=EPS, fused=True,
        )  # fmt: skip
        with trainer.ahead() as ahead:
            compare(trainer, ahead, plain, optimizer, arguments.steps, arguments.profile)
        dist.destroy_process_group()


def compare(trainer: Trainer, ahead, plain: Plain, optimizer, steps: int, profile: bool) -> None:  # type: ignore[no-untyped-def]
    """Alternate steps of both sides and print the ratio."""
    batch: list[torch.Tensor] = []

    def stack(step: int) -> float:
        prepared = trainer.begin(ahead, step)
        inputs = prepared.inputs.microbatches[0]
        batch[:] = [x.view(BATCH, LENGTH).clone() for x in (inputs.ids, inputs.labels, inputs.weights)]
        start = time.perf_counter()
        done = trainer.run_step(prepared)
        trainer.update(done)
        losses.append(done.totals.loss)
        return time.perf_counter() - start

    def by_hand(step: int) -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = plain(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.step()
        plain_losses.append(loss.item())
        return time.perf_counter() - start

    losses: list[float] = []
    plain_losses: list[float] = []
    pairs = [(stack(step), by_hand(step)) for step in range(1, WARMUP + steps + 1)][WARMUP:]
    ours, theirs = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
    ratios = sorted(a / b for a, b in pairs)
    print(f"{steps} steps each, alternating; medians: stack {ours:.1f} ms, plain torch {theirs:.1f} ms")
    print(
        f"ratio of neighbouring steps: median {statistics.median(ratios):.3f}, "
        f"quartiles {ratios[len(ratios) // 4]:.3f} to {ratios[3 * len(ratios) // 4]:.3f}"
    )
    worst = max(abs(a - b) / b for a, b in zip(losses, plain_losses, strict=True))
    print(f"largest relative difference of the loss over {len(losses)} steps: {worst:.1e}")
    assert worst < 1e-4, "the two sides do not train the same model"
    if profile:
        last = WARMUP + steps
        for title, run in (("stack", lambda: stack(last + 1)), ("plain torch", lambda: by_hand(last + 1))):
            print_profile(title, run)


def print_profile(title: str, run: Callable[[], object]) -> None:
    """Print the costliest operators of one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    table = profiler.key_averages().table(
        sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=60
    )
    print(f"\n{title}\n{table}")


if __name__ == "__main__":
    main()
