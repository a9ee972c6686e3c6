"""What is said where a search finds no layout to simulate: why, and the nearest that would do."""

from dataclasses import replace
from math import log2, prod

from omni.config import ConfigError
from omni.planning.choice import text_of, value_of
from omni.planning.layout_question import Question
from omni.planning.layout_space import CP, DP, PP, TP
from omni.planning.memory_advice import GIB, made_of
from omni.planning.nearest import nearest_text
from omni.planning.search import Search, Searching


def check_found(question: Question, ranks: int, out: Search) -> None:
    """Refuse a search that found nothing.

    Raises:
        ConfigError: where given keys leave no layout, or none fits by the closed form: naming the component
            that holds most, and the nearest that would do.
    """
    if out.found:
        return
    if not out.pruned:
        raise ConfigError(_indivisible(question, ranks, out))
    most = question.config.cluster.memory_bytes
    assert most is not None
    keys, held = min(out.pruned, key=lambda each: each[1].total())
    (kind, component), size = max(held.items(), key=lambda item: item[1])
    spec = question.resolve(Searching(question, ranks).settled(keys), ranks)
    raise ConfigError(
        f"launch.ranks={ranks}: no layout fits cluster.memory_bytes={most}, {most / GIB:.1f} GiB. Of that "
        f"which holds least ({text_of(keys)}) a rank holds at least {held.total() / GIB:.1f} GiB: "
        f"{made_of(held)}. Most of it, {size / GIB:.1f}, is {kind} of {component}. "
        f"{nearest_text(spec, *question.begin)}"
    )


def _indivisible(question: Question, ranks: int, out: Search) -> str:
    """Say why given keys leave no layout, and which ranks, or which value of one of them, would."""
    own = {key: value_of(question.config, key) for key in (TP, CP, PP, DP) if key in question.given}
    copy, beside = prod(own.values()), question.config.placement.ranks or 0
    remedies = []
    if ranks % copy:
        near = sorted({max(1, ranks // copy) * copy, -(-ranks // copy) * copy})
        remedies.append(f"launch.ranks={' or '.join(map(str, near))}")
    for key, value in own.items():
        free = replace(question, given=question.given - {key}).space(ranks)
        others = {split[key] for split in free.splits(beside) if key in split}
        if others:
            remedies.append(f"{key}={min(others, key=lambda n: (abs(log2(n / value)), n))}")
    why = f": {out.refused}" if out.refused else ""
    would = f". {', or '.join(remedies)} would do" if remedies else ""
    return f"launch.ranks={ranks}: no layout has {text_of(own) or 'the keys that are given'}{why}{would}"
