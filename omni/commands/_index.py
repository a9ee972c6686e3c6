"""`omni data index`: an index of samples that stay where they lie."""

import argparse
import os
import sys
from functools import partial
from typing import Any

from dataloader.visible import visible
from omni.commands._out import check_out

_DESCRIPTION = """\
Finds the samples of a folder, a file or a URL such as s3://bucket/folder, and writes where each of them lies.
Nothing is copied and no item decoded; a run reads samples there. What is not taken is counted by reason, and
left_out.jsonl in the index has each by its key. A build that was cut goes on where it was.

  omni data index data/tars --out data/tars_index --recipe webdataset --jobs 4
  RAY_ADDRESS=head:6379 omni data index s3://bucket/tars --out /shared/index --recipe webdataset --on ray
  omni data index data/tars --out data/tars_index --recipe '{name: webdataset, text: json, key: caption}'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("source", metavar="SRC", help="what to index")
    parser.add_argument("--out", required=True, metavar="DIR", help="where the index goes")
    parser.add_argument(
        "--recipe", required=True, metavar="R", help="what samples are in: a name, or a mapping with its keys"
    )
    parser.add_argument("--tokenizer", default="bytes", metavar="T", help="as of omni data build")
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="processes that scan (default: 1; on Ray all CPUs of the cluster)",
    )
    parser.add_argument(
        "--on",
        choices=("here", "ray"),
        default="here",
        help="ray: as tasks of the cluster at RAY_ADDRESS, or of one that is started on this machine",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    from dataloader.sources.build import build_index
    from dataloader.sources.ray_jobs import each_on_ray
    from infra.launchers.ray_cluster import on_cluster

    def tell(text: str) -> None:
        print(visible(text), file=sys.stderr, flush=True)

    check_out("--out", args.out, folder=True)
    recipe, tokenizer = chosen(args.recipe, "--recipe"), chosen(args.tokenizer)
    given = args.source, args.out, recipe, tokenizer
    if args.on == "here":
        jobs = 1 if args.jobs is None else args.jobs
        new = build_index(*given, jobs, args.overwrite, tell)
    else:
        with on_cluster("auto" if os.environ.get("RAY_ADDRESS") else None) as ray:
            jobs = int(ray.cluster_resources()["CPU"]) if args.jobs is None else args.jobs
            tell(f"at most {jobs} tasks at a time of a cluster with {len(ray.nodes())} nodes")
            new = build_index(
                *given, jobs, args.overwrite, tell, each_on=lambda parts: partial(each_on_ray, ray, parts)
            )
    print(f"{args.out}: {'indexed' if new else 'is there and intact, nothing to do'}")
    return 0


def chosen(text: str, option: str = "--tokenizer") -> Any:
    """A tokenizer or recipe as a user names it: a name, or a mapping in YAML as `data.tokenizer` takes it."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(
            f"{option} {text}: neither a name nor a mapping {{name: NAME, key: value}} ({error})"
        ) from None
