"""`omni data inspect`: what is in a dataset, on the screen or as a page."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dataloader.visible import visible
from omni.commands._datasets import datasets_in, left_out_of
from omni.commands._index import chosen
from omni.commands._out import check_out, make_room, writing
from omni.commands._shared import at_least

_COSTED = 1024  # samples of the step whose costs are drawn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `omni data inspect`."""
    parser.add_argument("paths", nargs="+", metavar="DIR", help="a dataset, or a folder of datasets")
    parser.add_argument(
        "--samples", type=at_least(0), default=3, metavar="N", help="samples to print (default: 3)"
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write a page with pictures, recordings and what carries loss instead"
    )
    parser.add_argument(
        "--costs",
        nargs="+",
        metavar="KEY",
        help="with --html: draw what samples cost a run of this configuration, such as experiment=llama3_70b",
    )
    parser.add_argument("--tokenizer", metavar="T", help="that it was built with, where it takes keys")


def run(args: argparse.Namespace) -> int:
    """Print or write; 0. Raises ValueError for a user's mistake, such as what is no dataset."""
    from rich.console import Console
    from rich.table import Table

    from dataloader.index import Index
    from dataloader.sources.reader import open_reader
    from dataloader.tokenizer import get_tokenizer
    from omni.config import ConfigError

    check_out("--html", args.html)
    if args.html:
        return _write_page(args)
    if args.costs:
        raise ConfigError(f"--costs {' '.join(args.costs)}: costs are drawn on a page: add --html FILE")
    console = Console()
    tokenizer = get_tokenizer(chosen(args.tokenizer)) if args.tokenizer else None
    for path in datasets_in(args.paths):
        index = Index.open(path, tokenizer)
        totals = index.manifest.totals
        items = ", ".join(f"{count:,} {modality}" for modality, count in totals.items.items()) or "no items"
        console.print(
            f"{path}: {len(index):,} samples, {totals.text_tokens:,} text tokens "
            f"({index.manifest.tokenizer}), {items}, {totals.bytes:,} bytes in "
            f"{len(index.manifest.shards)} shards; recipe {visible(index.manifest.recipe) or 'not named'}",
            markup=False,
            highlight=False,
        )
        for reason, count, first in left_out_of(path):
            told = f"left out: {count:,} for {visible(reason)}, first {visible(first)}"
            console.print(told, markup=False, highlight=False)
        lengths = [index.meta(i, "", lambda modality, size: (0, 0)).text_tokens for i in range(len(index))]
        histogram = Table("text tokens", "samples", "")
        buckets = [0] * (max(lengths).bit_length() + 1)
        for value in lengths:
            buckets[value.bit_length()] += 1
        for bits, count in enumerate(buckets):
            if count:
                label = f"{1 << bits - 1} to {(1 << bits) - 1}" if bits else "0"
                histogram.add_row(label, f"{count:,}", "█" * -(-40 * count // max(buckets)))
        console.print(histogram)
        reader = open_reader(path, tokenizer=tokenizer)
        samples = Table("sample", "items", "text", "targets")
        for i in range(min(args.samples, len(index))):
            sample = reader.read(i, text=True, items=True)
            sizes = " ".join(f"{item.modality} {'×'.join(map(str, item.size))}" for item in sample.items)
            spans = sample.targets
            targets = "all" if spans is None else " … ".join(sample.text[a:b] for a, b in spans) or "none"
            samples.add_row(*map(_literal, (sample.id, sizes, _short(sample.text), _short(targets))))
        console.print(samples)
        reader.files.close()
    return 0


def _write_page(args: argparse.Namespace) -> int:
    from dataloader.manifest import read_manifest
    from dataloader.tokenizer import get_tokenizer
    from infra.run_folder import write_text
    from omni.commands._data_page import page

    paths = datasets_in(args.paths)
    of_each = [get_tokenizer(chosen(args.tokenizer or read_manifest(path).tokenizer)) for path in paths]
    costs = [_costs(path, args.costs) if args.costs else [] for path in paths]
    text = page(list(zip(paths, of_each, costs, strict=True)), args.samples)
    with writing("--html", args.html):
        write_text(make_room(Path(args.html)), text)
    print(f"{args.html}: {len(paths)} datasets, {len(text.encode()):,} bytes")
    return 0


def _costs(path: Path, overrides: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Titled values of histograms: what the first thousand samples or so of a dataset, as long as a run takes
    them that trains on nothing else, cost each of its components.
    """
    from omni.commands._balance import histograms_of, samples_of, sized
    from omni.compose import compose_config
    from omni.planning.balance_score import step_of
    from omni.planning.balance_table import NO_SHARING, Choice, planner_of

    config = compose_config(overrides)
    ranks, replicas = sized(config, 1)
    config.data.step_samples = -(-_COSTED // replicas) * replicas
    trace = samples_of(config, str(path.resolve()), 0)
    planner = planner_of(config, ranks, trace, Choice("two_constraint", NO_SHARING, 1, 1))
    step = step_of(planner)
    (title, lengths), *costs = histograms_of(step)
    return [(f"{title}, of the first {len(lengths):,} that a run takes", lengths), *costs]


def _short(text: str) -> str:
    from dataloader.format import PLACEHOLDER

    line = text.replace(PLACEHOLDER, "□").replace("\n", " ")
    return line[:60] + "…" * (len(line) > 60)


def _literal(text: str) -> str:
    from rich.markup import escape

    return escape(visible(text))
