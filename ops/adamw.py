"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) of neighbouring parameters, in one pass over each.

Gradients are scaled, moments and fp32 weights move, and the model's own weights are rounded to their type,
all at once: per number, a GPU reads the gradient, the weight and both moments, writes the last three and the
model's weight, and nothing else. An update that is not sound changes nothing.

Moments in bf16 are computed in fp32 and rounded when they are put down. Rounded to the nearest they stall:
bf16 has 8 significant bits, so a change below 2⁻⁹ to 2⁻⁸ of a number is lost, and the second moment, which
decays by 1 - beta2 of itself a step, stays where it is for beta2 = 0.999, however small gradients become.
Instead each is rounded up with the probability that keeps its mean (stochastic rounding; of weights in bf16:
Zamirai et al., arXiv 2010.06192): a threshold is added to the bits that go, and they are cut off. Thresholds
are the Weyl sequence of the count of updates, of which those of any successive updates lie evenly between two
numbers of bf16; steps of both moments' are those of Roberts' R₂ sequence, so that the two are not in step.
They are the same for all numbers of an update. So they need no state and no place of a number in its
parameter: the rounding is the same under any layout and after a restart.
Of 4,000 second moments of noise over 20 / (1 - beta2) updates, the root of the mean square of the error is
0.6 % for beta2 = 0.95 and 3 % for 0.999 (random thresholds: 0.8 %, 4 %; nearest: 0.6 %, 128 %).

Shapes: n numbers of a shard, k parameters in it.
"""

import torch

from ops.kernels.choice import takes_kernel
from ops.operators import operator

STEPS = (0xC13FA9A9, 0x91E10DA5)
"""Of the thresholds of both moments, from update to update: 2³² / 1.3247… and its square."""


def _adamw(
    main: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    model: torch.Tensor | None,
    runs: torch.Tensor,
    decays: torch.Tensor,
    counts: torch.Tensor,
    factor: torch.Tensor,
    sound: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Update fp32 weights `main` [n], moments [n] in fp32 or bf16, and the model's weights [n] unless they
    are those, with gradients [n] times `factor` [], if `sound` [] is 1 and not 0.

    `runs` [k, 2] int64 are where each parameter begins and ends in the shard, in order; `decays` [k] their
    weight decay and `counts` [k] how many updates they have had, this one included, in fp32. Between
    parameters, where there are only zeros, anything finite may be left.
    """
    if takes_kernel(main):
        from ops.kernels import adamw as kernels

        kernels.adamw(
            *(main, grad, exp_avg, exp_avg_sq, model, runs[:, 1], decays, counts, factor, sound),
            *(lr, beta1, beta2, eps, STEPS),
        )
        return
    held = exp_avg, exp_avg_sq
    for (start, end), decay, count in zip(runs.tolist(), decays.tolist(), counts, strict=True):
        own = slice(start, end)
        moments = [moment[own].float() for moment in held]
        torch._fused_adamw_(
            *([main[own]], [grad[own] * factor], [moments[0]], [moments[1]], [], [count]),
            amsgrad=False,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=eps,
            maximize=False,
            found_inf=1 - sound,
        )
        for moment, exact, step in zip(held, moments, STEPS, strict=True):
            if moment.dtype is torch.bfloat16:
                moment[own] = rounded(exact, count, step)
        if model is not None:
            model[own] = main[own]


def rounded(exact: torch.Tensor, count: torch.Tensor, step: int) -> torch.Tensor:
    """Numbers in fp32, rounded to bf16 by the threshold of an update, the `count` [] th, whose sequence has a
    `step`.
    """
    threshold = (count.long() * step & 0xFFFFFFFF) >> 16
    return ((exact.view(torch.int32) + threshold.int()) & -0x10000).view(torch.float32).bfloat16()


def _nothing(*given: object) -> None:
    pass


adamw = operator(_adamw, _nothing, changed=("main", "exp_avg", "exp_avg_sq", "model"))
