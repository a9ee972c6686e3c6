"""What several commands share: how a configuration is given, and signs of life."""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
EVERY_S = 2.0


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Declare the overrides, and the folder of a user's own files."""
    add_config_dir(parser)
    parser.add_argument("overrides", nargs="*", help="configuration, such as layout.llm.pp=2")


def add_config_dir(parser: argparse.ArgumentParser) -> None:
    """Declare the folder of a user's own files."""
    parser.add_argument(
        "--config-dir", metavar="FOLDER", help="your own configuration files, beside those of hydra_conf"
    )


def signs_of_life(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Pass `items` on, saying on stderr every two seconds how many of `total` have gone by."""
    said = time.monotonic()
    for count, item in enumerate(items):
        if time.monotonic() - said >= EVERY_S:
            said = time.monotonic()
            print(f"{what} {count} of {total}", file=sys.stderr, flush=True)
        yield item
