"""A configuration against transformers' own model of the same folder: the loss of its first step, and logits.

The ranks of a run begin with the folder's weights and compute their first step; then they score the step's
samples by passes that go the way training goes, several times, each with other labels at every position. A
loss is log Σ exp(logits) - logit of the label, so what is compared are log-probabilities, of the token that
comes and of others drawn at random, at every position, under any layout, and no rank holds all logits.

Invariant: the loss differs by at most TOLERANCE of itself, log-probabilities by at most TOLERANCE of the
largest logit. transformers computes each sample alone, unpacked, in fp32, in one process, afterwards.
Pictures are decoded once, by the platform, and then prepared by the folder's own processor.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.lineage import end_with_parent
from ops.ints import Ints

if __name__ == "__main__":
    end_with_parent()  # before the imports that take seconds

import numpy as np
import numpy.typing as npt
import torch

from dataloader.decode import decode_image
from dataloader.loader import TextArrays
from dataloader.tokens import SampleMeta, tokenize
from infra.run_folder import RunFolder
from omni.config import ConfigError
from omni.models.towers.processors import processed
from omni.planning.plan_process import PlanStep
from omni.planning.run_spec import RunSpec
from omni.training.forward import ForwardPasses, grouped, of_domain
from omni.training.parity import Difference, first_loss, worst_first
from omni.training.trainer import Trainer
from parallel.plain import collect_plain
from pipeline.plan import StepPlan

TOLERANCE = 1e-5
OTHERS = 3  # labels that are drawn for each position, beside the token that comes
FILE = "against.pt"
_QUANTISED = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}


@dataclass(frozen=True)
class Scored:
    """A sample of T tokens: input `ids` and `labels` int64 [T], which `targets` count bool [T], the losses
    [1 + OTHERS, T] of its labels and of those drawn, and its `pictures`, uint8 [H, W, C] each.
    """

    ids: Ints
    labels: Ints
    targets: npt.NDArray[np.bool_]
    losses: npt.NDArray[np.float32]
    pictures: tuple[npt.NDArray[np.uint8], ...] = ()


def drawn(number: int, tokens: int, vocab: int) -> Ints:
    """Labels for a sample, by its number in the step, int64 [OTHERS, T]: the same on every rank."""
    return np.random.default_rng(number).integers(vocab, size=(OTHERS, tokens))


def measure(
    spec: RunSpec, folder: RunFolder, rank: int, device: torch.device, plan_step: PlanStep | None = None
) -> tuple[float, list[Scored]] | None:
    """Compute the loss of the first step and score its samples, on rank 0; None on other ranks.

    Raises:
        DataError: on all ranks, if there is nothing to learn from the first step.
    """
    trainer = Trainer(spec, folder, rank, device, plan_step)
    trainer.saving.restore()
    with trainer.ahead() as ahead:
        done = trainer.run_step(trainer.begin(ahead, 1))
        loss = first_loss(done)
    taken = done.prepared.plan.taken
    metas = [spec.planner.world.meta_of(taken, number) for number in range(len(taken))]
    found = _scored(trainer, metas)
    trainer.control.barrier("the end")
    trainer.close()
    return None if found is None else (loss, found)


def _scored(trainer: Trainer, metas: Sequence[SampleMeta]) -> list[Scored] | None:
    spec, rank = trainer.spec, trainer.rank
    vocab, texts = spec.config.model.llm.vocab, []
    assert vocab is not None, "a folder says it"
    for meta in metas:
        sample = trainer.readers[meta.source].read(meta.id, text=True, items=False)
        texts.append(tokenize(sample, meta, spec.tokenizer))
    labels = [
        np.concatenate([own[None], drawn(number, len(own), vocab)])
        for number, (_, own, _) in enumerate(texts)
    ]
    passes, at_once = ForwardPasses(spec, rank, trainer.readers), 4 * spec.config.data.pass_tokens
    pieces: list[tuple[int, int, int, torch.Tensor]] = []  # sample, row of labels, first, losses
    for numbers in grouped(metas, at_once * spec.layout.dp):
        group = [metas[n] for n in numbers]
        plan = spec.planner.evaluation(1, group, spec.arrangement.num_domains, rank.domain)
        spec.planner.verify(plan)
        own = of_domain(plan, numbers)
        for row in range(1 + OTHERS):
            arrays = {
                i: (texts[n][0], labels[n][row], np.ones(len(texts[n][0]), np.bool_))
                for i, n in enumerate(own)
            }
            pieces += [
                (own[sample], row, first, torch.tensor(losses))
                for sample, first, losses in _losses(passes, plan, [metas[n] for n in own], arrays)
            ]
    gathered = collect_plain(pieces, rank.groups.world)
    if gathered is None:
        return None
    full = [np.full(of.shape, -np.inf, np.float32) for of in labels]  # which no loss is
    for number, row, first, losses in (piece for of_rank in gathered for piece in of_rank):
        full[number][row, first : first + len(losses)] = losses.numpy()
    pictures = [_pictures(trainer, meta) for meta in metas]
    return [Scored(*text, *more) for text, more in zip(texts, zip(full, pictures, strict=True), strict=True)]


def _pictures(trainer: Trainer, meta: SampleMeta) -> tuple[npt.NDArray[np.uint8], ...]:
    """The items of a sample, decoded."""
    if not meta.items:
        return ()
    items = trainer.readers[meta.source].read(meta.id, text=False, items=range(len(meta.items))).items
    return tuple(decode_image(item) for item in items)


def _losses(
    passes: ForwardPasses, plan: StepPlan, metas: Sequence[SampleMeta], texts: Mapping[int, TextArrays]
) -> Iterator[tuple[int, int, npt.NDArray[np.float32]]]:
    """Losses of neighbouring tokens, where this rank reports them: their sample, their first, and they."""
    domain, rank = plan.domain, passes.rank
    found = passes.run(plan, metas, texts, predict=False)
    for batch, inputs, losses in found if domain.reports(rank.domain_rank) else ():
        assert inputs.weights is not None
        # Targets are gathered in the order of pieces, with padding between those of tp ranks.
        real = losses[inputs.weights > 0].float().cpu().numpy()
        for piece in rank.assembler.pieces(domain, batch):
            size = piece.stop - piece.start
            yield piece.sample, piece.start, real[:size]
            real = real[size:]
        assert not len(real)


def compare(
    loss: float, scored: Sequence[Scored], model: torch.nn.Module, processor: Any = None
) -> list[Difference]:
    """Differences of the loss and of the log-probabilities of each sample, the worst first, from what a model
    of transformers computes; a `processor` of transformers makes its inputs of pictures.

    Raises:
        AssertionError: if a token was scored by no rank.
    """
    total, targets, largest = 0.0, 0, 0.0
    apart = []
    for number, sample in enumerate(scored):
        assert not np.isneginf(sample.losses).any(), f"tokens of sample {number} were scored by no rank"
        with torch.no_grad():
            logits = model(**_inputs(sample, model, processor)).logits[0].double()
        largest = max(float(logits.abs().max()), largest)  # NaN, if it is
        labels = np.concatenate([sample.labels[None], drawn(number, len(sample.ids), logits.shape[-1])])
        theirs = logits.logsumexp(-1) - logits.gather(1, torch.from_numpy(labels).T).T
        total += float(theirs[0][torch.from_numpy(sample.targets)].sum())
        targets += int(sample.targets.sum())
        apart.append(float((torch.from_numpy(sample.losses).double() - theirs).abs().max()))
    of_logits = [Difference(f"logits of sample {n}", away / largest) for n, away in enumerate(apart)]
    mean = total / targets
    of_loss = Difference(f"first loss, {loss:.6f} and {mean:.6f}", abs(loss / mean - 1))
    return [of_loss, *worst_first(of_logits)]


def _inputs(sample: Scored, model: torch.nn.Module, processor: Any) -> dict[str, torch.Tensor]:
    """What transformers' model takes of a sample."""
    ids, takes = torch.from_numpy(sample.ids)[None], inspect.signature(model.forward).parameters
    made = [processed(processor, picture) for picture in sample.pictures]
    names = [name for name in made[0] if name in takes] if made else []
    found = {name: torch.from_numpy(np.concatenate([of[name] for of in made])) for name in names}
    if "mm_token_type_ids" in takes:  # 1 at rows of a picture
        config: Any = model.config
        found["mm_token_type_ids"] = (ids == config.image_token_id).int()
    return {"input_ids": ids, **found}


def theirs(folder: Path) -> torch.nn.Module:
    """transformers' model of a folder, in fp32, by no code but its own; quantised weights made full numbers.

    Raises:
        ConfigError: saying what transformers said, if it cannot load it.
    """
    import transformers

    more: dict[str, Any] = {}
    try:
        said = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        quantised = getattr(said, "quantization_config", None)
        if quantised is not None:
            kind = getattr(transformers, _QUANTISED[quantised["quant_method"]])
            more["quantization_config"] = kind(dequantize=True)
        kind = transformers.AutoModelForCausalLM
        if hasattr(said, "vision_config"):
            kind = transformers.AutoModelForImageTextToText
        found: torch.nn.Module = kind.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, **more
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(f"transformers {transformers.__version__} cannot load {folder}: {error}") from error
    return found.eval()


def load(path: Path) -> tuple[float, list[Scored]]:
    """Read what ranks have measured."""
    loss, scored = torch.load(path, weights_only=True)
    return loss, [_arrays(*of) for of in scored]


def _arrays(
    ids: torch.Tensor,
    labels: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    pictures: Sequence[torch.Tensor],
) -> Scored:
    own = (ids.numpy(), labels.numpy(), targets.numpy(), losses.numpy())
    return Scored(*own, tuple(of.numpy() for of in pictures))


def save(path: Path, loss: float, scored: Sequence[Scored]) -> None:
    """Write what ranks have measured."""

    def tensors(*arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    of_all = [(*tensors(of.ids, of.labels, of.targets, of.losses), tensors(*of.pictures)) for of in scored]
    torch.save((loss, of_all), path)


def main(config_path: Path) -> None:
    """One rank of a measurement, as torchrun starts it."""
    from omni.compose import load_config
    from omni.training.seats import find_seat
    from omni.training.worker import joined

    seat = find_seat(load_config(config_path), RunFolder(config_path.parent))
    with joined(config_path, seat) as (spec, folder, rank, device, plan_step):
        measured = measure(spec, folder, rank, device, plan_step)
        if measured is not None:
            save(folder.path / FILE, *measured)


if __name__ == "__main__":
    from omni.training.worker import exit_with

    exit_with(main, Path(sys.argv[1]))
