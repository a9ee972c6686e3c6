"""What every wrapped tower says to the platform: the contract of an encoder, read off the tower's module."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from dataloader.format import Item
from omni.keys import ConfigError, at_least
from omni.models.blocks import EncoderPart, FinalNorm, Merged, Projector, value_bytes
from omni.models.item_layout import Grid
from omni.models.registry import Attention, ItemArrays
from omni.models.towers.calls import Calls, Given
from omni.models.towers.folder import NO_FOLDER, copied, freeze, open_tower, weights_of
from omni.models.towers.probe import Trial, on_meta, try_out
from omni.models.towers.work import Line, MeasuredLayers
from omni.open_models.folder import Folder

if TYPE_CHECKING:
    from omni.models.towers.module import TowerModule, TowerPacked
    from parallel.megatron import ProcessGroupCollection
    from parallel.packed import Sharding

LOW = "1.1 %"
"""How much more memory a rehearsal of tiny towers found than is stated, at most (docs/towers.md)."""


@dataclass
class TowerConfig:
    """The keys of a wrapped tower. `folder` has its `config.json`, its processor and, unless `weights` is
    false, which draws them, its weights. `tower` names the class of transformers, null for the one that
    `config.json` means.

    A `projector`, which null means where the tower makes no rows for an LLM itself, is a norm and two linears
    of our own, drawn; `merge` neighbours, of a picture in height and in width, become one row of it. With
    `connector` the tower of a whole model makes rows as the model does, by the connector in the folder. A
    `row_break` is the id of a token between neighbouring lines of rows.
    """

    folder: str = ""
    weights: bool = True
    tower: str | None = None
    projector: bool | None = None
    merge: int = at_least(1, 1)
    connector: bool = False
    row_break: int | None = at_least(0, None)


class WrappedTower(ABC):
    """A published tower as an encoder. Its items stay whole, and its layers on every rank.

    A kind of towers says how one is called (`calls`), what of an item it is given, and how it is tried out.
    """

    Config = TowerConfig
    unit = None
    calls: Calls
    modality: str = "image"
    attach: tuple[str, ...] = ("llm.embed",)
    values: int
    """Numbers of a token."""
    out: int
    """Numbers of what the tower puts out."""
    merges: int = 1
    """Tokens of which the tower itself makes one."""
    projected: int
    """What the tower puts out of which the projector makes a row, 0 without one."""

    def __init__(self, config: TowerConfig) -> None:
        if not config.folder:
            raise ConfigError(NO_FOLDER)
        self.config = config
        self.tower = open_tower(config.folder, config.tower, config.connector)
        self.made = on_meta(self.tower, torch.float32)
        self.still: frozenset[str] = frozenset()

    @abstractmethod
    def sample(self, tokens: int, element: int) -> tuple[int, torch.Tensor, Given]:
        """Return values without storage of about so many tokens of one item, how many they are, and what is
        given with them.
        """

    @abstractmethod
    def count(self, size: tuple[int, ...]) -> tuple[int, int]:
        """Return (tokens, rows) of an item of this size. As for `Encoder`."""

    @abstractmethod
    def decode(self, item: Item) -> np.ndarray:
        """Turn an item's encoded bytes into an array. As for `Encoder`."""

    @abstractmethod
    def blank(self) -> np.ndarray:
        """Return a decoded item that the processor takes."""

    @abstractmethod
    def preprocess(self, array: np.ndarray) -> ItemArrays:
        """Turn a decoded item into values [T, V], and positions on no axis: grids say where tokens stand."""

    @abstractmethod
    def given(self, grids: Sequence[Grid], dtype: torch.dtype, device: torch.device) -> Given:
        """Prepare what the tower is given for items whose rows have these grids."""

    def tried(self, tokens: int, element: int) -> tuple[int, Trial]:
        """Try the tower out on about so many tokens with numbers of `element` bytes. Return how many they
        were, and what it took.

        Raises:
            ConfigError: for a tower that cannot be called so.
        """
        made = self.made if element != 2 else on_meta(self.tower, torch.bfloat16)
        count, values, given = self.sample(tokens, element)
        places = list(given.places.values())
        return count, try_out(
            self.tower, made, lambda own: self.calls.tokens(own, values, given), [values, *places]
        )

    def freeze(self, tried: Trial) -> None:
        """Let biases that are added to all keys alike stay as they are: the softmax takes them out again, so
        that their gradients are rounding, of which Adam makes steps that differ from layout to layout.
        """
        shifts = {id(own) for own in tried.shifts}
        self.still = frozenset(name for name, own in self.made.named_parameters() if id(own) in shifts)
        freeze(self.made, self.still)

    def layers(self, element: int) -> MeasuredLayers:
        """Measure the tower's layers with numbers of `element` bytes."""
        few, first = self.tried(256, element)
        many, second = self.tried(max(4096, 2 * few), element)
        whole = [lengths == (many,) for lengths in second.attended]
        pairs = [
            sum(n**2 for n in of)
            for of, all_of_it in zip(second.attended, whole, strict=True)
            if not all_of_it
        ]

        def line(name: str) -> Line:
            return Line.through((few, getattr(first, name)), (many, getattr(second, name)))

        return MeasuredLayers(
            parameters=tuple((own.numel(), not own.requires_grad) for own in self.made.parameters()),
            layers=self.tower.layers,
            heads=second.heads[0],
            head_dim=second.heads[1],
            element=element,
            flops=line("flops"),
            moved=line("moved"),
            kept=line("kept"),
            ahead=line("forward"),
            back=line("backward"),
            passing=line("passing"),
            out=self.out * element // self.merges * bool(self.projected),
            whole=sum(whole),
            seen=sum(pairs) // (many * len(pairs)) if pairs else 0,
        )

    @cached_property
    def _layers(self) -> dict[int, MeasuredLayers]:
        """By the bytes of a number: planning asks more than once."""
        return {}

    def work(self, width: int, element: int, tp: int = 1) -> EncoderPart:
        """State the tower's work as measured on tensors without storage, and that of the projector.

        Raises:
            ConfigError: for rows that are not as wide as the LLM.
        """
        if not self.projected and self.out != width:
            raise ConfigError(
                f"{self.tower.key}: {self.tower.kind.__name__} makes rows of {self.out} numbers, and "
                f"model.llm.hidden={width}: take an LLM of this width, or set encoder.projector=true"
            )
        if element not in self._layers:
            self._layers[element] = self.layers(element)
        tail = FinalNorm(self.out, "LayerNorm"), Projector(self.out, self.projected, width, element)
        return EncoderPart(
            stem=(),
            stack=self._layers[element],
            tail=tuple(Merged(block, self.merges) for block in tail) if self.projected else (),
            width=width,
            token_bytes=value_bytes(self.values, axes=0),
        )

    def attention(self) -> Attention:
        """Its heads, though items are not shared."""
        own = self.tower
        return Attention(own.layers, own.heads, own.heads, own.hidden // own.heads, causal=False)

    def check_tp(self, key: str, tp: int) -> None:
        """The layers are transformers' own, whole on every rank."""
        name = self.tower.kind.__name__
        raise ConfigError(f"{key}={tp}: the layers of {name} are not divided; leave it at 1")

    def notes(self) -> list[str]:
        """What learns nothing, and how sure its memory is."""
        told = [
            f"memory of {self.tower.kind.__name__} is measured on its class, and rehearsals found up to "
            f"{LOW} more: omni rehearse measures this run"
        ]
        if self.still:
            told.append(
                f"{len(self.still)} biases that are added to all keys alike, such as {min(self.still)}, stay "
                f"as they are: a softmax takes them out again"
            )
        return told

    def published(self) -> Folder | None:
        """The folder's weights of the tower, None where they are drawn.

        Raises:
            ConfigError: if it has none, or others.
        """
        if not self.config.weights:
            return None
        shapes = {name: tuple(own.shape) for name, own in self.made.named_parameters()}
        rules = copied(shapes, "tower.")
        named = [replace(rule, theirs=tuple(map(self.on_disk, rule.theirs))) for rule in rules]
        return weights_of(self.tower, named)

    def on_disk(self, name: str) -> str:
        """What files call a parameter that the tower's module calls `name`: the same. Towers of which
        transformers renames parameters as it loads them say it here.
        """
        return name

    def pack(
        self, sharding: "Sharding", positions: torch.Tensor, dtype: torch.dtype, device: torch.device
    ) -> "TowerPacked":
        """Prepare a pass over whole items by their grids, or over none where other ranks have some."""
        from omni.models.towers.module import TowerPacked

        given = None if sharding.tail else self.given(sharding.grids, dtype, device)
        return TowerPacked(qkv_format="thd", given=given)

    def build(
        self, width: int, dtype: torch.dtype, device: torch.device, groups: "ProcessGroupCollection"
    ) -> "TowerModule":
        """Build the module on `device`."""
        from omni.models.towers.module import TowerModule

        projector = {"merge": self.projected, "out": self.out, "width": width}
        module = TowerModule(self.tower, self.calls, **projector, dtype=dtype)
        freeze(module.tower, self.still)
        return module.to(device)
