"""What several commands share: how a configuration is given, and signs of life."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

from omni.commands._out import check_out, make_room, writing

if TYPE_CHECKING:
    from pipeline.drawing import Track

EVERY_S = 3.0


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Declare the overrides, and the folder of a user's own files."""
    add_config_dir(parser)
    parser.add_argument("overrides", nargs="*", help="configuration, such as layout.llm.pp=2")


def add_config_dir(parser: argparse.ArgumentParser) -> None:
    """Declare the folder of a user's own files."""
    parser.add_argument(
        "--config-dir", metavar="FOLDER", help="your own configuration files, beside those of hydra_conf"
    )


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Declare a trace."""
    parser.add_argument(
        "--trace",
        metavar="NAME|TOKENS|FILE|FOLDER",
        help="samples in place of data.sources: a synthetic trace (balanced, longtail, shift), texts of so "
        "many tokens each, a Parquet file of lengths (columns: docs/data.md) or a dataset's folder, of which "
        "the index is read. Items that no encoder takes are left out of their samples; a note says how many, "
        "of which share of tokens",
    )


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument: an integer from `least` on."""

    def integer(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{text}: must be at least {least}")
        return value

    return integer


def check_drawing(path: Path | None) -> None:
    """Refuse to draw in a format that there is not, or where nothing can be written.

    Raises:
        ConfigError: naming the formats, or the folder.
    """
    from omni.config import ConfigError

    if path is not None and path.suffix not in (".svg", ".json"):
        raise ConfigError(f"--draw {path}: write a picture (.svg) or trace events (.json)")
    check_out("--draw", path)


def write_drawing(path: Path, pictures: "Sequence[tuple[str, Sequence[Track]]]") -> None:
    """Draw titled timelines, in the format that the path ends with."""
    from infra.run_folder import write_text
    from pipeline.drawing import svg, trace_events

    text = svg(pictures) if path.suffix == ".svg" else trace_events(pictures)
    with writing("--draw", path):
        write_text(make_room(path), text)


@contextmanager
def signs_of_life(say: Callable[[], str]) -> Iterator[None]:
    """Print on stderr what a block is at, every few seconds until it ends."""
    start, done = time.monotonic(), Event()

    def speak() -> None:
        while not done.wait(EVERY_S):
            print(f"{say()}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    speaker = Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        done.set()
        speaker.join()
