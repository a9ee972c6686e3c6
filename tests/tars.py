"""Samples as tar files in the layout of WebDataset."""

import io
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from dataloader.format import Sample

Member = tuple[str, bytes]


def members_of(sample: Sample) -> list[Member]:
    """The members of a sample: items by number, and its text with placeholders."""
    items = [(f"{sample.id}.{k}.{item.format}", item.data) for k, item in enumerate(sample.items)]
    return [*items, (f"{sample.id}.txt", sample.text.encode())]


def write_tar(file: Path, members: Iterable[Member], kind: int = tarfile.USTAR_FORMAT) -> Path:
    """Write an archive of regular members."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w", format=kind) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file


def write_tars(folder: Path, samples: Sequence[Sample], each: int) -> Path:
    """Write archives of so many samples each, whose names are in order."""
    for number, first in enumerate(range(0, len(samples), each)):
        members = [member for sample in samples[first : first + each] for member in members_of(sample)]
        write_tar(folder / f"{number:05}.tar", members)
    return folder
