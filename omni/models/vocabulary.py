"""What of the LLM knows the vocabulary, as statements of work: the embedding, and the output with its losses.

All sizes are bytes unless they are called elements. Shapes: T tokens, D width, n targets.
"""

from dataclasses import dataclass

from ops.linear import linear_bytes, linear_flops
from parallel.work import (
    FP32,
    INDEX,
    Collective,
    Grad,
    Load,
    Weight,
    Work,
    all_gather,
    all_reduce,
    reduce_scatter,
)


@dataclass(frozen=True)
class WordEmbedding:
    """Word embeddings of `ids`, this rank's share of the vocabulary; `shared` with an output elsewhere, or
    that of the same part too (`is_output`).
    """

    ids: int
    hidden: int
    tp: int
    element: int
    shared: bool
    is_output: bool = False

    def weights(self) -> tuple[Weight, ...]:
        """The table."""
        return (Weight(self.ids * self.hidden, tied=self.shared),)

    def forward(self, load: Load) -> Work:
        """Each rank looks up its ids among all tokens, and their sums are scattered."""
        shard = load.tokens // self.tp * self.hidden * self.element
        looked_up = load.tokens * (INDEX + 1) if self.tp > 1 else 0  # ids of this rank's share, and which
        kept = shard + looked_up * (not load.frozen)
        return Work(collectives=reduce_scatter("tp", shard, self.tp), kept=kept)

    def backward(self, load: Load, grad: Grad) -> Work:
        """At the end of everything gradients of all tokens, of those whose ids are of this rank's share, and
        of the table; nothing where it is frozen. The gradient that an output has made of the same table
        waits, and autograd adds both up in a third tensor.
        """
        if grad is Grad.WEIGHT or load.frozen:
            return Work()
        width = self.hidden * self.element
        tokens, table, found = load.tokens * width, self.ids * width, load.tokens * (INDEX + 1)
        made = (
            max(2 * tokens + found, tokens + table + load.tokens * INDEX) if self.tp > 1 else tokens + table
        )
        return Work(
            collectives=all_gather("tp", tokens // self.tp, self.tp),
            last=max(made + table, 3 * table) if self.is_output else made,
        )


@dataclass(frozen=True)
class Losses:
    """The output layer over `ids`, this rank's share of the vocabulary, and the losses, `chunk` targets at a
    time. It has a weight of its own unless that is the embedding of the same part; it may be `shared` with an
    embedding elsewhere.
    """

    ids: int
    hidden: int
    tp: int
    element: int
    chunk: int
    owned: bool
    shared: bool

    def weights(self) -> tuple[Weight, ...]:
        """The output layer."""
        return (Weight(self.ids * self.hidden, tied=self.shared),) if self.owned else ()

    def forward(self, load: Load) -> Work:
        """Hidden states of the targets are gathered; beyond a chunk, probabilities are made anew later."""
        return Work(
            flops=self._flops(load.targets),
            plain_flops=self._flops(load.targets),
            bytes=self._bytes(load.targets),
            collectives=(*all_gather("tp", self._wanted(load), self.tp), *self._sums(load.targets)),
            kept=self._kept(load.targets) - self._unkept(load),
            workspace=self._losses(load.targets)
            + self._unkept(load)
            + self._reduced(load.targets)
            - (self._probabilities(load.targets) if load.targets <= self.chunk else 0),
            passing=self._alone(load),
        )

    def backward(self, load: Load, grad: Grad) -> Work:
        """Gradients of hidden states and, unless it is frozen, of the weight; of several chunks each is
        computed anew.
        """
        if grad is Grad.WEIGHT:
            return Work()
        anew, products = load.targets > self.chunk, 1 if load.frozen else 2
        return Work(
            flops=products * self._flops(load.targets),
            plain_flops=products * self._flops(load.targets),
            bytes=products * self._bytes(load.targets),
            collectives=(
                *reduce_scatter("tp", self._wanted(load), self.tp),
                *(self._sums(load.targets) if anew else ()),
            ),
            workspace=self._backward_workspace(load.targets, 0 if load.frozen else 1),
        )

    def _alone(self, load: Load) -> int:
        """Where nothing is kept, beside the stream that the part began with."""
        targets = load.targets
        stream = load.tokens // self.tp * self.hidden * self.element
        found = min(targets, self.chunk) * (INDEX + 1) * (self.tp > 1 and targets <= self.chunk)
        return stream + self._hidden(targets) + self._losses(targets) + self._reduced(targets) + found

    def _flops(self, targets: int) -> int:
        return linear_flops(targets, self.hidden, self.ids * self.tp) // self.tp

    def _bytes(self, targets: int) -> int:
        """Of the product, and of the logits, which become probabilities in fp32."""
        product = linear_bytes(targets, self.hidden, self.ids, self.element)
        return product + targets * self.ids * FP32

    def _wanted(self, load: Load) -> int:
        return load.targets // self.tp * self.hidden * self.element

    def _sums(self, targets: int) -> tuple[Collective, ...]:
        """Of each chunk the largest logits; the sums of exponents and the targets' logits."""
        full, rest = divmod(targets, self.chunk)
        chunks = ((self.chunk, full), (rest, 1 if rest else 0))
        return tuple(
            one
            for rows, calls in chunks
            for size in (rows * FP32, 2 * rows * FP32)
            for one in all_reduce("tp", size, self.tp, calls)
        )

    def _hidden(self, targets: int) -> int:
        return targets * self.hidden * self.element

    def _unkept(self, load: Load) -> int:
        """Hidden states that no gradient of a frozen weight needs, unless chunks are made anew from them."""
        return self._hidden(load.targets) * (load.frozen and load.targets <= self.chunk)

    def _kept(self, targets: int) -> int:
        """Bytes that losses keep: gathered hidden states, and probabilities if they are not made anew."""
        return self._hidden(targets) + (self._probabilities(targets) + targets * (INDEX + 1)) * (
            targets <= self.chunk
        )

    def _logits(self, targets: int) -> int:
        return min(targets, self.chunk) * self.ids * self.element

    def _probabilities(self, targets: int) -> int:
        return min(targets, self.chunk) * self.ids * FP32

    def _losses(self, targets: int) -> int:
        """The losses of a chunk: logits, the same in fp32, less the largest (where ranks share them),
        and probabilities.
        """
        copies = 2 + (self.tp > 1)
        own = self._logits(targets) if self.element < FP32 else 0
        return own + copies * self._probabilities(targets)

    def _reduced(self, targets: int) -> int:
        """What ranks that share the vocabulary find for each target: the largest logit, two sums, and both
        sums together; in losses that will be made anew, where the target is, too.
        """
        found = 0 if targets <= self.chunk else INDEX + 1
        return min(targets, self.chunk) * (5 * FP32 + found) if self.tp > 1 else 0

    def _backward_workspace(self, targets: int, learns: int) -> int:
        weight = learns * self.ids * self.hidden * self.element
        chunk = self._hidden(min(targets, self.chunk))
        # Gradients of logits and then of what they were made of, when probabilities have gone.
        made = self._logits(targets) + weight + chunk
        if targets <= self.chunk:
            # Gradients in fp32 come before the logits' own: two where one rank has all of the vocabulary, and
            # where ranks share it the losses' three times, as they are and on the way to those of labels.
            first = 2 * self._probabilities(targets)
            if self.tp > 1:
                first = self._probabilities(targets) + 3 * targets * FP32
            return max(first, made - self._probabilities(targets))
        # The last chunk is computed anew while the gradients of the others and of the weight wait. Its own
        # gradient of the weight is then added to theirs, into a third tensor.
        done = self._hidden(targets - self.chunk) + targets * FP32
        # One rank with all of the vocabulary has its probabilities and two gradients at once.
        anew = max(
            self._losses(targets) + self._reduced(targets),
            3 * self._probabilities(targets) if self.tp == 1 else 0,
        )
        return done + max(anew + weight, made + weight, 3 * weight)
