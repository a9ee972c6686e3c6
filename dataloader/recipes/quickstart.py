"""The quickstart's data, from installed packages alone: strips of real digits, and Python's docstrings."""

import ast
import io
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from dataloader.format import PLACEHOLDER, Item, Sample
from dataloader.tokenizer import Tokenizer
from dataloader.writer import DatasetWriter, is_intact

NUM_TRAIN_STRIPS = 16_000
NUM_HELDOUT_STRIPS = 400
MAX_DIGITS = 8

_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_TRAIN_DIGITS = 1_437  # of 1,797
_MIN_DOCSTRING = 40  # characters; only longer ones are kept
_SKIPPED = {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages"}


def build_quickstart(
    out: str | Path,
    tokenizer: Tokenizer,
    seed: int = 0,
    overwrite: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, bool]:
    """Build strips_train, strips_heldout, docs_train and docs_heldout under `out`; name → whether built now.

    Strips are one to eight 8x8 handwritten digits side by side (scikit-learn's `load_digits`), grayscale PNG,
    followed by their names: no digit image is in both parts. Docs are docstrings of Python's standard
    library, split by source file, each text once. Both follow from `seed` and the installed versions alone.
    An intact dataset that is there already is kept, unless `overwrite`; DataError if it is another one.
    `tell` is called before anything is built, with what that is.
    """
    out = Path(out)
    recipes = {
        name: f"quickstart/{name} seed={seed}"
        for name in ("strips_train", "strips_heldout", "docs_train", "docs_heldout")
    }
    missing = [
        name for name, recipe in recipes.items() if overwrite or not is_intact(out / name, recipe, tokenizer)
    ]
    if missing:
        tell(f"building {', '.join(missing)} in {out} ...")
    samples: dict[str, Sequence[Sample]] = {}
    if any(name.startswith("strips") for name in missing):
        samples["strips_train"], samples["strips_heldout"] = draw_strips(seed)
    if any(name.startswith("docs") for name in missing):
        samples["docs_train"], samples["docs_heldout"] = _documents()
    for name in missing:
        with DatasetWriter(out / name, tokenizer, overwrite=overwrite, recipe=recipes[name]) as writer:
            for sample in samples[name]:
                writer.add(sample)
    return {name: name in missing for name in recipes}


def draw_strips(seed: int) -> tuple[list[Sample], list[Sample]]:
    """Strips of digits with their names, to train on and held out, from the seed alone."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images.astype(np.int64) * 255 // 16).astype(np.uint8)  # stored as 0..16
    rng = np.random.Generator(np.random.Philox(seed))
    order = rng.permutation(len(images))
    parts = []
    for name, members, count in (
        ("train", order[:_TRAIN_DIGITS], NUM_TRAIN_STRIPS),
        ("heldout", order[_TRAIN_DIGITS:], NUM_HELDOUT_STRIPS),
    ):
        lengths = rng.permutation([1 + i % MAX_DIGITS for i in range(count)])
        strips = []
        for i, num_digits in enumerate(lengths):
            chosen = members[rng.integers(len(members), size=num_digits)]
            strips.append(_strip(f"{name}-{i:05d}", images[chosen], digits.target[chosen]))
        parts.append(strips)
    return parts[0], parts[1]


def _strip(name: str, images: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64]) -> Sample:
    pixels = np.concatenate(list(images), axis=1)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    text = PLACEHOLDER + " ".join(_WORDS[label] for label in labels)
    height, width = pixels.shape
    return Sample(name, text, (Item("image", "png", (height, width), buffer.getvalue()),))


def _documents() -> tuple[list[Sample], list[Sample]]:
    """Docstrings for training and held out. A text that occurs again anywhere is left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[Sample], list[Sample]] = ([], [])
    seen = set()
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        if _SKIPPED & set(file.relative_to(root).parts):
            continue
        # By name, so that the split is the same whatever other files a Python version has.
        heldout = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") % 12 == 0
        for i, text in enumerate(_docstrings(file)):
            if text not in seen:
                seen.add(text)
                parts[heldout].append(Sample(f"{name}#{i}", text))
    if not parts[0] or not parts[1]:
        raise ValueError(
            f"{root} of Python {sys.version.split()[0]} holds no sources to take docstrings from"
        )
    return parts


def _docstrings(file: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old sources
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if len(text) > _MIN_DOCSTRING and PLACEHOLDER not in text:
                yield text
