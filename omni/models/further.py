"""Prediction of tokens further ahead (DeepSeek-V3, section 2.2) as a statement: what is ahead of its layer.

Each further token takes the stream and the embedding of the next token, both normed, through a linear back to
the width of the stream, a layer, a norm and the output, which is the model's. No module computes this yet:
what is kept follows from the equations, and no rehearsal has checked it.

Shapes: T tokens, D width.
"""

from dataclasses import dataclass

from omni.models.pieces import norm_weights
from ops.linear import linear_flops
from parallel.work import FP32, Collective, Grad, Load, Weight, Work, all_gather, reduce_scatter


@dataclass(frozen=True)
class Joined:
    """Stream and embedding [T, 2·D], normed, to the stream [T, D]. The embedding of `ids`, this rank's share
    of the vocabulary, is held here if the virtual stage has none; then it is `tied` to the first one's.
    """

    hidden: int
    norm: str
    tp: int
    element: int
    ids: int = 0

    def weights(self) -> tuple[Weight, ...]:
        """Two norms, the linear, which ranks divide, and the embedding if it is elsewhere."""
        norms = norm_weights(self.hidden, self.norm, self.tp > 1) * 2
        table = (Weight(self.ids * self.hidden, tied=True),) if self.ids else ()
        return (*table, *norms, Weight(2 * self.hidden * self.hidden // self.tp))

    def _stream(self, tokens: int) -> int:
        return tokens // self.tp * self.hidden * self.element

    def forward(self, load: Load) -> Work:
        """It keeps the embedding, both after their norms, what these divided by, and its output; the input is
        kept by what made it. Inputs of all ranks are gathered, and their parts of the output.
        """
        shard = self._stream(load.tokens)
        flops = linear_flops(load.tokens, 2 * self.hidden, self.hidden) // self.tp
        return Work(
            flops=flops,
            collectives=(*all_gather("tp", 2 * shard, self.tp), *all_gather("tp", shard, self.tp)),
            kept=4 * shard + 2 * load.tokens // self.tp * FP32,
            workspace=(2 * shard + shard) * self.tp,
        )

    def backward(self, load: Load, grad: Grad) -> Work:
        """Gradients of both inputs are scattered; for that of the weight the inputs are gathered again."""
        shard = self._stream(load.tokens)
        inputs, weights = grad is not Grad.WEIGHT, grad is not Grad.INPUT
        scattered: tuple[Collective, ...] = reduce_scatter("tp", 2 * shard, self.tp) if inputs else ()
        again: tuple[Collective, ...] = all_gather("tp", 2 * shard, self.tp) if weights else ()
        return Work(
            flops=self.forward(load).flops * (inputs + weights),
            collectives=(*scattered, *again),
            kept=3 * shard if grad is Grad.INPUT else 0,
            workspace=2 * shard * self.tp,
        )
