"""The simplest prediction of a published step that is worth beating: model FLOPs at a share of the peak that
is fitted for each family, a pipeline's bubble, and the messages of tensor parallelism at the rate of their
link.
"""

from collections.abc import Callable, Sequence
from functools import cache
from statistics import median

from simulator_rows import Row, rows_of

from parallel.work import even_load

Predicted = Callable[[Row], float]


def roofline(rows: Sequence[Row]) -> Predicted:
    """Fit the shares on `rows`; return the seconds that they predict for any row."""

    def share(row: Row) -> float:
        compute_s, messages_s = _seconds(row.number)
        return compute_s / max(row.published_s - messages_s, 0.1 * row.published_s)

    families = {row.family for row in rows}
    shares = {family: median(share(row) for row in rows if row.family == family) for family in families}
    other = median(shares.values())

    def predicted(row: Row) -> float:
        compute_s, messages_s = _seconds(row.number)
        return compute_s / shares.get(row.family, other) + messages_s

    return predicted


@cache
def _seconds(number: int) -> tuple[float, float]:
    """Seconds of a row's FLOPs at the peak, with its bubble, and of its messages of tensor parallelism."""
    row = rows_of()[number - 1]
    spec = row.resolved(1)
    tokens = row["mbs"] * row["seq"] // row["cp"]
    load = even_load(tokens, tokens * row["seq"], targets=tokens)
    forward = sum(part.forward(load).flops for part in spec.work.values()) * row["tp"] * row["cp"]
    flops = 3 * forward * row.microbatches * row["dp"]
    bubble = 1 + (row["pp"] - 1) / (row["vpp"] * row.microbatches)
    layers, hidden = spec.config.model.llm.layers, spec.config.model.llm.hidden
    # Ten messages of a layer, each of all tokens but its own rank's, in bf16.
    sent = 20 * layers / row["pp"] * row.microbatches * tokens * hidden * (1 - 1 / row["tp"])
    inside = spec.cluster.links.inside.bytes_per_s
    return flops / row["gpus"] / spec.cluster.flops * bubble, sent / inside
