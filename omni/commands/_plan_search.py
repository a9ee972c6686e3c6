"""`omni plan --search`: the best layouts, why each takes so long, what they cost, and a configuration."""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni.commands._out import check_out, make_room, writing
from omni.commands._shared import check_drawing, signs_of_life, write_drawing

if TYPE_CHECKING:
    from omni.config import Config
    from omni.planning.layout_question import Question
    from omni.planning.search import Finalist, Search
    from omni.rehearsal.estimate import Estimate

DAY_S = 86_400
_SEARCHES = 3  # with ever more memory to spare
_OTHERS = (("half the ranks", 1, 2), ("twice the ranks", 2, 1))
_LEFT_OUT = ("run", "choice", "tracking")  # of a configuration that is written: of one run alone


def run_search(arguments: argparse.Namespace) -> int:
    """Search, print, write.

    Raises:
        ConfigError: for a user's mistake, and where no layout can be or fits, with what comes nearest.
        PlanRefusedError: for a plan that breaks a rule.
    """
    from omni.commands._plan_estimate import on_cluster
    from omni.compose import compose_config, given_keys
    from omni.config import ConfigError
    from omni.planning.layout_question import question_of
    from omni.planning.layouts import planned_ranks
    from omni.rehearsal.stand_in_data import use_trace

    for option in ("domain", "ops", "framework", "multirun"):
        if getattr(arguments, option) not in (None, False):
            raise ConfigError(f"--{option} is of one layout: leave it out, or leave out --search")
    check_drawing(arguments.draw)
    check_out("--out", arguments.out)
    config = compose_config(arguments.overrides, arguments.config_dir)
    given, ranks = given_keys(arguments.overrides, arguments.config_dir), planned_ranks(config.launch)
    on_cluster(config)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.trace:
            use_trace(config, arguments.trace, Path(folder) / "trace")
        question = question_of(config, given)
        with signs_of_life(lambda: f"searching layouts of {ranks:,} ranks"):
            out, best, whole = found_whole(question, ranks)
            others = dict(_others(question, best, ranks))
        figures = _figures(question, out, best, whole, others, arguments.tokens)
        print(json.dumps(figures, indent=2) if arguments.json else "\n".join(_lines(figures)), flush=True)
        if arguments.draw:
            _draw(arguments.draw, out.found)
        if arguments.out:
            _write(arguments.out, best.spec.config, ranks, without_data=arguments.trace is not None)
    return 0


def found_whole(question: "Question", ranks: int) -> "tuple[Search, Finalist, Estimate]":
    """Search. Return with it the first of the best layouts whose step fits in all domains, and that step. A
    search plans few domains: where another holds more than there is, it is done again, which is told on
    stderr, and in domains of as many ranks as much is left free as that one holds beyond those. Candidates of
    all searches are counted.

    Raises:
        ConfigError: where no layout can be, or none fits: of the best, naming the component and keys that
            would make it less.
    """
    from omni.config import ConfigError
    from omni.planning.choice import text_of
    from omni.planning.fullest import check_memory
    from omni.planning.memory_advice import GIB
    from omni.planning.nearest import nearest_text
    from omni.planning.no_layout import check_found
    from omni.planning.search import search
    from omni.rehearsal.estimate import estimate

    refused, simulated = "", 0
    spare, unseen = dict[int, int](), dict[int, int]()
    for _ in range(_SEARCHES):
        for size, more in unseen.items():
            told = f"{more / GIB:.1f} GiB more than those that were planned: searching with as much to spare"
            print(f"note: in a layout that was found another domain of {size} holds {told}", file=sys.stderr)
        spare, unseen = spare | unseen, {}
        out = search(question, ranks, spare)
        simulated = out.simulated = out.simulated + simulated
        if not refused:
            check_found(question, ranks, out)
        for each in out.found:
            whole = estimate(each.spec, each.spec.planner.distinct_domains(*question.begin))
            try:
                check_memory(each.spec, whole.fullest)
            except ValueError as error:
                refused = refused or (
                    f"launch.ranks={ranks}: no layout that was tried fits. Of that which comes nearest "
                    f"({text_of(each.told())}) {error} {nearest_text(each.spec, *question.begin)}"
                )
                size, more = each.spec.arrangement.domain_size, whole.fullest.bytes - each.seen
                if each.seen <= (each.spec.cluster.memory_bytes or 0) and more > spare.get(size, 0):
                    unseen[size] = max(more, unseen.get(size, 0))
            else:
                return out, each, whole
        if not unseen:
            break
    raise ConfigError(refused)


def _others(question: "Question", best: "Finalist", ranks: int) -> "Iterator[tuple[str, Finalist | str]]":
    """The best layout with half and with twice the replicas, or why that cannot be."""
    from omni.planning.search import with_ranks

    for name, times, by in _OTHERS:
        try:
            yield name, with_ranks(question, best.tried.keys, ranks * times // by)
        except ValueError as error:
            yield name, str(error)


def _figures(
    question: "Question",
    out: "Search",
    best: "Finalist",
    whole: "Estimate",
    others: "Mapping[str, Finalist | str]",
    tokens: float | None,
) -> dict[str, Any]:
    """What was found, as plain values."""
    from omni.planning.choice import text_of

    spec, taken = best.spec, whole.plan.taken
    own = taken.tokens / (best.step_ns / 1e9)
    price = spec.config.cluster.price_per_hour
    figures: dict[str, Any] = {
        "ranks": spec.arrangement.world,
        "cluster": spec.cluster.name,
        "samples": len(taken),
        "tokens": taken.tokens,
        "longest_sample": question.longest,
        "layouts": out.split,
        "hold_too_much": len(out.pruned),
        "candidates_simulated": out.simulated,
        "simulated": [_row(each, taken.tokens) for each in out.found],
        "keys": text_of(best.told()),
        "simulated_step_s": whole.step_s,
        "simulated_tokens_per_s": whole.tokens_per_s(),
        "simulated_mfu": whole.mfu(spec),
        "over_best": whole.over_best,
        "held_bytes": whole.fullest.bytes,
        "memory_bytes": spec.cluster.memory_bytes,
        "others": {
            name: of if isinstance(of, str) else of.tried.refused or taken.tokens / (of.step_ns / 1e9) / own
            for name, of in others.items()
        },
    }
    if tokens is not None:
        figures["days"] = tokens / whole.tokens_per_s() / DAY_S
        figures["for_tokens"] = tokens
        if price is not None:
            figures["price"] = price * spec.arrangement.world * 24 * figures["days"]
    return figures


def _row(found: "Finalist", tokens: int) -> dict[str, Any]:
    """One of the best, in the slowest of its domains that were simulated, and why it takes longer than even
    work there.
    """
    from omni.planning.choice import text_of
    from pipeline.causes import causes_of, work_of

    spec, domain, step_ns = found.spec, found.plan.domain, found.step_ns
    work = work_of(domain, spec.table)
    causes = causes_of(domain, spec.table, sum(work) / len(work), spec.planner.domain.single_queue)
    shares = {name: ns / step_ns for name, ns in zip(vars(causes), astuple(causes), strict=True)}
    return {
        "keys": text_of(found.told()),
        "step_s": step_ns / 1e9,
        "tokens_per_s": tokens / (step_ns / 1e9),
        "refused": found.tried.refused,
        "schedule": domain.schedule,
        "causes": shares,
    }


def _lines(of: dict[str, Any]) -> Iterator[str]:
    """The same in lines of text."""
    from omni.planning.memory_advice import GIB

    yield (
        f"{of['ranks']:,} ranks of {of['cluster']}; a step of {of['samples']:,} samples, "
        f"{of['tokens']:,} tokens, "
        f"whole: at most {of['longest_sample']:,}"
    )
    yield (
        f"{of['layouts']} layouts of the LLM, of which {of['hold_too_much']} hold too much; "
        f"{of['candidates_simulated']} candidates simulated, in domains that samples load most:"
    )
    yield f"\n{'step ms':>10} {'tokens/s':>12}  longer than even work by: keys"
    for row in of["simulated"]:
        causes = {name: share for name, share in row["causes"].items() if name != "even" and share >= 0.01}
        said = ", ".join(
            f"{name} {share:.0%}" for name, share in sorted(causes.items(), key=lambda own: -own[1])
        )
        yield f"{row['step_s'] * 1e3:10,.1f} {row['tokens_per_s']:12,.0f}  {said or 'nothing'}"
        yield f"{'':25}{row['schedule']} {row['keys']}{row['refused'] and ' (' + row['refused'] + ')'}"
    memory = f" of {of['memory_bytes'] / GIB:.1f}" if of["memory_bytes"] else ""
    yield (
        f"\nbest, all domains (simulated on {of['cluster']}): {of['simulated_step_s'] * 1e3:,.1f} ms, "
        f"{of['simulated_tokens_per_s']:,.0f} tokens/s, MFU {of['simulated_mfu']:.1%}, {of['over_best']:.2f} "
        f"times the best possible step; {of['held_bytes'] / GIB:.1f}{memory} GiB"
    )
    if "days" in of:
        price = f", {of['price']:,.0f} in all" if "price" in of else ""
        yield f"{of['for_tokens']:.4g} tokens take {of['days']:,.1f} days{price}"
    for name, times in of["others"].items():
        said = times if isinstance(times, str) else f"{times:.2f} times as many tokens/s for the same step"
        yield f"{name}, the same layout: {said}"
    yield f"keys: {of['keys']}"


def _draw(path: Path, found: "Sequence[Finalist]") -> None:
    """Draw the steps of the best layouts."""
    from omni.planning.choice import text_of
    from pipeline.costs import simulate
    from pipeline.drawing import rows_of, team_names

    pictures = []
    for each in found:
        domain, queue = each.plan.domain, each.spec.planner.domain.single_queue
        names = team_names(each.spec.arrangement.global_ranks(each.plan.number), domain.team)
        pictures.append(
            (f"{text_of(each.told())} (simulated)", rows_of(simulate(domain, each.spec.table, queue), names))
        )
    write_drawing(path, pictures)


def _write(path: Path, config: "Config", ranks: int, *, without_data: bool) -> None:
    """Write a configuration as an experiment: all of its keys, but those of one run, and of a trace."""
    from omegaconf import OmegaConf

    from infra.run_folder import write_text

    values: Any = OmegaConf.to_container(OmegaConf.structured(config))
    values = {section: of for section, of in values.items() if section not in _LEFT_OUT}
    values["launch"]["ranks"] = ranks
    if without_data:
        values["data"]["sources"] = {}
    text = OmegaConf.to_yaml(OmegaConf.create(values))
    with writing("--out", path):
        write_text(make_room(path), f"# @package _global_\n# Found by omni plan --search.\n{text}")
