"""`omni data`: build, index, inspect, verify, hash, balance and remix datasets; make and describe traces."""

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from dataloader.visible import visible
from omni.commands import _balance, _index, _inspect, _remix
from omni.commands._datasets import datasets_in
from omni.commands._index import chosen
from omni.commands._out import check_out, make_room, writing
from omni.commands._shared import at_least

_OWN_TOKENIZER = ("quickstart_chat", "quickstart_open")  # recipes that train one
_COUNT = at_least(0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `omni data`."""
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="build|index|inspect|show|verify|hash|balance|remix|trace"
    )

    build = actions.add_parser("build", help="build a dataset; does nothing if it is there and intact")
    origin = build.add_mutually_exclusive_group(required=True)
    origin.add_argument("--recipe", choices=["quickstart", *_OWN_TOKENIZER], help="a built-in recipe")
    origin.add_argument("--from-jsonl", metavar="FILE", help="your own samples, one JSON object per line")
    origin.add_argument("--from-messages", metavar="FILE", help="chats, one JSON object per line")
    build.add_argument("--out", required=True, metavar="DIR", help="where the dataset goes")
    build.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="T",
        help="counts the text tokens, as data.tokenizer: bytes (the default), or '{name: hf, path: DIR}'",
    )
    build.add_argument(
        "--root", metavar="DIR", help="where the JSONL's files may lie (default: below the JSONL's folder)"
    )
    build.add_argument(
        "--skip-bad", type=_COUNT, default=0, metavar="N", help="leave out up to N bad lines (default: 0)"
    )
    build.add_argument("--seed", type=_COUNT, help="of the draws of --recipe (default: 0)")
    build.add_argument("--overwrite", action="store_true", help="replace what is there")

    _index.add_arguments(actions.add_parser("index", help="index samples where they lie, without a copy"))

    inspect = actions.add_parser("inspect", help="print totals, lengths and a few samples, or write a page")
    _inspect.add_arguments(inspect)

    show = actions.add_parser("show", help="print whole texts")
    show.add_argument("path", metavar="DIR", help="a dataset")
    show.add_argument("--mask", action="store_true", help="colour what carries loss")
    show.add_argument("--samples", type=_COUNT, default=3, metavar="N", help="samples to print (default: 3)")
    show.add_argument("--tokenizer", metavar="T", help="that it was built with, where it takes keys")

    verify = actions.add_parser("verify", help="read and decode everything; exit 1 if anything is wrong")
    verify.add_argument("paths", nargs="+", metavar="DIR", help="a dataset, or a folder of datasets")
    verify.add_argument("--tokenizer", metavar="T", help="that it was built with, where it takes keys")

    hashes = actions.add_parser("hash", help="write the hashes and ranges that an older dataset lacks")
    hashes.add_argument("paths", nargs="+", metavar="DIR", help="a dataset, or a folder of datasets")

    _balance.add_arguments(actions.add_parser("balance", help="how even steps would be by which policies"))

    _remix.add_arguments(actions.add_parser("remix", help="change what a run draws from a later step on"))

    trace = actions.add_parser("trace", help="sample metadata without payload")
    kinds = trace.add_subparsers(dest="trace_action", required=True, metavar="generate|describe")
    generate = kinds.add_parser("generate", help="write a synthetic trace")
    generate.add_argument("name", choices=["balanced", "longtail", "shift"])
    generate.add_argument("--out", required=True, metavar="FILE")
    generate.add_argument("--num", type=at_least(1), default=10_000, help="samples (default: 10000)")
    generate.add_argument("--seed", type=_COUNT, default=0, help="(default: 0)")
    generate.add_argument("--max-tokens", type=at_least(16), default=131_072, help="LLM tokens per sample")
    describe = kinds.add_parser("describe", help="print a trace's quantiles and shares")
    describe.add_argument("file", metavar="FILE")


def run(args: argparse.Namespace) -> int:
    """Carry out `omni data`; 0 if all is well, 2 for a user's mistake, in data too, and 1 where `verify`
    finds something wrong, or a disk or a store fails, with a message on stderr.
    """
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "build": _build,
        "index": _index.run,
        "inspect": _inspect.run,
        "show": _show,
        "verify": _verify,
        "hash": _hash,
        "balance": _balance.run,
        "remix": _remix.run,
        "trace": _trace,
    }
    try:
        with writing("--out", getattr(args, "out", None)):
            return actions[args.action](args)
    except (ValueError, OSError) as error:
        print(f"omni data {args.action}: {visible(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


def _build(args: argparse.Namespace) -> int:
    from dataloader.recipes.from_jsonl import build_from_jsonl
    from dataloader.recipes.quickstart import build_quickstart
    from dataloader.tokenizer import get_tokenizer

    def tell(text: str) -> None:
        print(visible(text), file=sys.stderr, flush=True)

    out = Path(args.out)
    if args.recipe and (args.root is not None or args.skip_bad):
        raise ValueError("--root and --skip-bad are of files of your own: leave them out with --recipe")
    if not args.recipe and args.seed is not None:
        raise ValueError("--seed is of --recipe: samples of your own are not drawn, leave it out")
    seed = args.seed or 0
    check_out("--out", out, folder=True)
    if args.recipe in _OWN_TOKENIZER:
        if args.tokenizer != "bytes":
            raise ValueError("--tokenizer: this recipe trains its own; leave it out")
        recipe = import_module(f"omni.commands._{args.recipe}")
        return _told(recipe.build(out, seed, args.overwrite, tell))
    tokenizer = get_tokenizer(chosen(args.tokenizer))
    if args.recipe:
        names = build_quickstart(out, tokenizer, seed, args.overwrite, tell)
        built = {out / name: new for name, new in names.items()}
    elif args.from_messages:
        from dataloader.recipes.from_messages import build_from_messages

        chats = args.from_messages
        built = {
            out: build_from_messages(chats, out, tokenizer, args.overwrite, args.skip_bad, tell, args.root)
        }
    else:
        new = build_from_jsonl(
            args.from_jsonl,
            out,
            tokenizer,
            overwrite=args.overwrite,
            root=args.root,
            skip_bad=args.skip_bad,
            tell=tell,
        )
        built = {out: new}
    return _told(built)


def _told(built: dict[Path, bool]) -> int:
    for path, new in built.items():
        print(f"{path}: {'built' if new else 'is there and intact, nothing to do'}")
    return 0


def _show(args: argparse.Namespace) -> int:
    from itertools import groupby

    from rich.console import Console
    from rich.text import Text

    from dataloader.format import PLACEHOLDER
    from dataloader.index import Index
    from dataloader.manifest import read_manifest
    from dataloader.sources.reader import open_reader
    from dataloader.tokenizer import get_tokenizer
    from omni.commands._data_page import characters_with_loss

    path = Path(args.path)
    tokenizer = get_tokenizer(chosen(args.tokenizer or read_manifest(path).tokenizer))
    index, reader = Index.open(path, tokenizer), open_reader(path, tokenizer=tokenizer)
    console = Console(highlight=False, soft_wrap=True)
    for i in range(min(args.samples, len(index))):
        sample = reader.read(i, text=True, items=False)
        loss, tokens, all_tokens = characters_with_loss(sample, tokenizer)
        console.print(
            f"{visible(sample.id)}: {tokens} of {all_tokens} tokens carry loss",
            markup=False,
        )
        shown = Text()
        for carries, characters in groupby(
            zip(loss, sample.text, strict=True), key=lambda pair: bool(pair[0])
        ):
            piece = visible("".join(c for _, c in characters)).replace(PLACEHOLDER, "□")
            shown.append(piece, "bold green" if carries and args.mask else "")
        console.print(shown)
    reader.files.close()
    return 0


def _verify(args: argparse.Namespace) -> int:
    from dataloader.audio import decode_audio
    from dataloader.decode import decode_image
    from dataloader.format import DataError
    from dataloader.manifest import read_manifest
    from dataloader.tokenizer import get_tokenizer
    from dataloader.verify import verify_dataset

    failed = False
    for path in datasets_in(args.paths):
        try:
            tokenizer = get_tokenizer(chosen(args.tokenizer or read_manifest(path).tokenizer))
            report = verify_dataset(path, tokenizer, {"audio": decode_audio, "image": decode_image})
        except DataError as error:
            print(f"{path}: cannot be opened: {visible(str(error))}")
            failed = True
            continue
        problems = ", ".join(f"{count} {reason}" for reason, count in sorted(report.problems.items()))
        print(f"{path}: {report.samples} samples, {report.items} items: {problems or 'all good'}")
        if not report.hashed:
            print(f"  files were not compared with hashes, it has none: omni data hash {path}")
        for modality, count in report.not_decoded.items():
            print(f"  {count} {modality} items were not decoded: no built-in decoder")
        for example in report.examples:
            print(f"  {visible(example)}")
        failed = failed or bool(report.problems)
    return int(failed)


def _hash(args: argparse.Namespace) -> int:
    from dataloader.writer import add_hashes, add_ranges

    for path in datasets_in(args.paths):
        written = add_hashes(path)
        print(f"{path}: {'hashes written' if written else 'has hashes; omni data verify compares them'}")
        if add_ranges(path):
            print(f"{path}: ranges of its samples written")
    return 0


def _trace(args: argparse.Namespace) -> int:
    import json

    from dataloader.trace import describe, generate
    from dataloader.trace_file import read_trace, write_trace
    from infra.run_folder import replacing

    if args.trace_action == "generate":
        check_out("--out", args.out)
        trace = generate(args.name, args.num, args.seed, args.max_tokens)
        with replacing(make_room(Path(args.out)), "wb") as file:
            write_trace(file, trace)
        print(f"{args.out}: {len(trace)} samples of {args.name}, seed {args.seed}")
    else:
        trace = read_trace(args.file)
        if sized := sum(bool(item.size) for meta in trace for item in meta.items):
            print(
                f"note: {sized:,} items are given by size: an encoder makes tokens and rows of them, none "
                "are counted here",
                file=sys.stderr,
            )
        print(json.dumps(describe(trace), indent=2))
    return 0
