"""How the layers of the LLM are cut into virtual stages."""

from functools import lru_cache
from itertools import accumulate

from parallel.layout import LayoutError


@lru_cache(maxsize=256)  # every run that is prepared asks several times
def stage_layers(costs: tuple[int, ...], last: int, pp: int, vpp: int = 1) -> tuple[int, ...]:
    """Divide layers of given costs over pp · `vpp` virtual stages, so that the costliest one costs least.

    `last` is what the last one does besides. Among equals, costs are as even as can be, and the first ones,
    which wait least, take more.

    Raises:
        LayoutError: if there are more virtual stages than layers.
    """
    stages = pp * vpp
    if len(costs) < stages:
        layout, remedy = f"layout.llm.pp={pp}", f"pp at most {len(costs)}"
        if vpp > 1:
            layout, remedy = f"{layout} with vpp={vpp}", f"pp·vpp at most {len(costs)}"
        raise LayoutError(
            f"{layout} leaves a {'virtual stage' if vpp > 1 else 'stage'} without a layer: "
            f"model.llm.layers={len(costs)}; choose {remedy}"
        )
    before = [0, *accumulate(costs)]

    def stage_cost(stage: int, start: int, stop: int) -> int:
        return before[stop] - before[start] + (last if stage == stages - 1 else 0)

    highest: dict[tuple[int, int], int] = {(0, 0): 0}  # by stages and layers divided: the costliest stage
    for stage in range(stages):
        for stop in range(stage + 1, len(costs) + 1):
            highest[stage + 1, stop] = min(
                max(highest[stage, start], stage_cost(stage, start, stop))
                for start in range(stage, stop)
                if (stage, start) in highest
            )
    limit = highest[stages, len(costs)]
    # Within that limit, the least sum of squares; the start of each stage as late as can be.
    best: dict[tuple[int, int], tuple[int, int]] = {(0, 0): (0, 0)}
    for stage in range(stages):
        for stop in range(stage + 1, len(costs) + 1):
            choices = [
                (best[stage, start][0] + stage_cost(stage, start, stop) ** 2, -start)
                for start in range(stage, stop)
                if (stage, start) in best and stage_cost(stage, start, stop) <= limit
            ]
            if choices:
                best[stage + 1, stop] = min(choices)
    sizes: list[int] = []
    stop = len(costs)
    for stage in range(stages, 0, -1):
        start = -best[stage, stop][1]
        sizes.insert(0, stop - start)
        stop = start
    return tuple(sizes)
