"""Training as its equations say: documents of a dataset, learning rates, clipping and AdamW, in fp64."""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image
from plain_model import Document, Weights, encode, losses

from dataloader.format import PLACEHOLDER, Sample

BOS, EOS, ITEM, END_OF_ITEM = 256, 257, 258, 259


def document(source: str, sample: Sample, vit: SimpleNamespace) -> Document:
    """bos, text as bytes with each item's rows and an end in its place, eos; spans say what carries loss. The
    rows of an item stand in lines, with a token between them if there is one.
    """
    images = [patches_of(np.asarray(Image.open(io.BytesIO(item.data))), vit) for item in sample.items]
    waiting = iter(images)
    tokens, counts = [BOS], [False]
    for place, letter in enumerate(sample.text):
        if letter == PLACEHOLDER:
            where = next(waiting)[1]
            high, wide = (int(of.max() + 1) // vit.merge for of in where.T)
            line = [ITEM] * wide
            between = [] if vit.row_break is None else [vit.row_break]
            own = line + (between + line) * (high - 1)
            tokens += [*own, END_OF_ITEM]
            counts += [False] * (len(own) + 1)
        else:
            learnt = sample.targets is None or any(start <= place < stop for start, stop in sample.targets)
            tokens += letter.encode()
            counts += [learnt] * len(letter.encode())
    ends = sample.targets is None or sample.targets[-1][1] == len(sample.text)
    sequence = torch.tensor([*tokens, EOS])
    return Document(
        source=source,
        ids=sequence[:-1],
        labels=sequence[1:],
        counts=torch.tensor([*counts, ends][1:]),
        rows=sequence[:-1] == ITEM,
        images=tuple(images),
    )


def patches_of(pixels: np.ndarray, vit: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Grey patches of an image, window by window, with the row and column of each; zeros fill the last."""
    grey = pixels.reshape(*pixels.shape[:2], -1).mean(2) / 255
    window = vit.patch * vit.merge
    height, width = (-(-side // window) * window for side in grey.shape)
    padded = np.zeros((height, width))
    padded[: grey.shape[0], : grey.shape[1]] = (grey - vit.mean) / vit.std
    found, places = [], []
    for top in range(0, height, window):
        for left in range(0, width, window):
            for row in range(top, top + window, vit.patch):
                for column in range(left, left + window, vit.patch):
                    found.append(padded[row : row + vit.patch, column : column + vit.patch].ravel())
                    places.append((row // vit.patch, column // vit.patch))
    return torch.tensor(np.array(found)), torch.tensor(places)


def learning_rate(optim: SimpleNamespace, step: int, steps: int) -> float:
    """Linear warm-up; then half a cosine, or constant with a linear end; the least rate at the last step."""
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    fall = steps - optim.warmup_steps
    if optim.schedule == "wsd" and optim.decay_steps is not None:
        fall = optim.decay_steps
    left = min(1.0, (steps - step) / fall)
    share = left if optim.schedule == "wsd" else (1 - math.cos(math.pi * left)) / 2
    return optim.min_lr + (optim.lr - optim.min_lr) * share


@dataclass
class Adam:
    """AdamW's memory of one parameter (Loshchilov & Hutter, 2019)."""

    updates: int = 0
    mean: torch.Tensor | float = 0.0
    square: torch.Tensor | float = 0.0

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, lr: float, optim: SimpleNamespace) -> None:
        """Change `weight`. Matrices decay, vectors do not."""
        self.updates += 1
        self.mean = optim.beta1 * self.mean + (1 - optim.beta1) * gradient
        self.square = optim.beta2 * self.square + (1 - optim.beta2) * gradient**2
        mean = self.mean / (1 - optim.beta1**self.updates)
        square = self.square / (1 - optim.beta2**self.updates)
        decay = optim.weight_decay if weight.dim() > 1 else 0.0
        weight -= lr * (decay * weight + mean / (square.sqrt() + optim.eps))


@dataclass
class Step:
    """What a step did, as far as a run of the product can be asked for it. Gradients are those of the mean
    loss, before clipping, by "component/name" of what trains; weights are those after the step.
    """

    losses: dict[str, float]
    targets: dict[str, int]
    norms: dict[str, float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


@dataclass
class PlainTraining:
    """A model under training: weights by "component/name", sizes and settings as a configuration has them."""

    weights: dict[str, torch.Tensor]
    llm: SimpleNamespace
    vit: SimpleNamespace
    optim: SimpleNamespace
    steps: int
    adam: dict[str, Adam] = field(default_factory=dict)

    def step(self, number: int, documents: Sequence[Document]) -> Step:
        """Train on the documents of a step, and say what happened."""
        frozen = [name for name, own in self.optim.components.items() if _within(number, own["frozen"])]
        leaves = {n: w.clone().requires_grad_(_component(n) not in frozen) for n, w in self.weights.items()}
        chosen = {
            name.removeprefix("llm/").removesuffix(".router.weight"): torch.zeros(len(weight))
            for name, weight in self.weights.items()
            if name.endswith(".router.weight")
        }
        found = {source: [torch.zeros(0)] for source in sorted({d.source for d in documents})}
        for each in documents:
            found[each.source].append(self._losses(leaves, each, chosen))
        count = {source: sum(map(len, parts)) for source, parts in found.items()}
        total = torch.cat([part for parts in found.values() for part in parts]).sum() / sum(count.values())
        trained = [n for n, w in leaves.items() if w.requires_grad and not n.endswith("expert_bias")]
        made = torch.autograd.grad(total, [leaves[n] for n in trained], materialize_grads=True)
        gradients = dict(zip(trained, made, strict=True))
        norms = {
            component: _norm(g for n, g in gradients.items() if _component(n) == component)
            for component in sorted(set(map(_component, trained)))
        }
        self._update(number, gradients, _norm(gradients.values()))
        if "llm" not in frozen:
            self._balance(chosen)
        return Step(
            losses={source: float(torch.cat(parts).detach().sum()) for source, parts in found.items()},
            targets=count,
            norms=norms,
            gradients=gradients,
            weights={n: w.clone() for n, w in self.weights.items()},
        )

    def _losses(self, weights: Weights, each: Document, chosen: Mapping[str, torch.Tensor]) -> torch.Tensor:
        image = {n.removeprefix("image/"): w for n, w in weights.items() if n.startswith("image/")}
        llm = {n.removeprefix("llm/"): w for n, w in weights.items() if n.startswith("llm/")}
        rows = [encode(image, self.vit, patches, at) for patches, at in each.images]
        return losses(llm, self.llm, each, torch.cat(rows, 1) if rows else None, chosen)

    def _update(self, number: int, gradients: Mapping[str, torch.Tensor], norm: float) -> None:
        clip = min(1.0, self.optim.clip / (norm + 1e-6)) if self.optim.clip > 0 else 1.0
        for name, gradient in gradients.items():
            own = self.optim.components.get(_component(name), {"lr_scale": 1.0})
            lr = learning_rate(self.optim, number, self.steps) * own["lr_scale"]
            self.adam.setdefault(name, Adam()).update(self.weights[name], clip * gradient, lr, self.optim)

    def _balance(self, chosen: Mapping[str, torch.Tensor]) -> None:
        """Move the bias of each expert towards an equal share (DeepSeek-V3, section 2.1.2)."""
        for layer, tokens in chosen.items():
            bias = self.weights.get(f"llm/{layer}.router.expert_bias")
            if bias is not None:
                bias += self.llm.moe.bias_update_rate * torch.sign(tokens.mean() - tokens)


def _component(name: str) -> str:
    return name.partition("/")[0]


def _norm(gradients: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(g.square().sum()) for g in gradients))


def _within(step: int, spans: Sequence[Sequence[int]]) -> bool:
    return any(first <= step < last for first, last in spans)
