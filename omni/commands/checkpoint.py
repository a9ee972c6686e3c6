"""`omni checkpoint`: verify, show and export the checkpoints of a run."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni.commands._out import check_out, make_room, writing

if TYPE_CHECKING:
    from dataloader.storage import Storage
    from infra.run_folder import RunFolder
    from omni.open_models.folder import Folder

_DESCRIPTION = """\
Looks into the checkpoints of a run, without ranks. RUN is a run folder, or where checkpoints lie: a path or a
URL that fsspec knows.

  omni checkpoint show runs/try                     what there is, and what it holds
  omni checkpoint verify runs/try                   read all of it, and compare every hash
  omni checkpoint export runs/try --out all.safetensors    all weights in one file
  omni checkpoint export runs/try --as hf --out FOLDER     the folder that it began with, as trained
  omni checkpoint export runs/try --as hf --encoder image --out FOLDER    the folder of an encoder alone
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("verify", "read checkpoints whole and compare every hash; exit code 1 if one is damaged"),
        ("show", "say what checkpoints hold"),
        ("export", "write the weights of one checkpoint to a file in the layout of safetensors, in fp32"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("run", metavar="RUN", help="a run folder, or a path or URL of checkpoints")
        default = "the newest" if name == "export" else "all"
        action.add_argument("--step", type=int, help=f"which checkpoint (default: {default})")
        if name == "export":
            action.add_argument("--out", type=Path, required=True, help="the file or folder to write")
            action.add_argument(
                "--as",
                dest="form",
                choices=("file", "hf"),
                default="file",
                help="one file of all weights, or a folder of a published model: the LLM, and encoders of it",
            )
            action.add_argument(
                "--like",
                metavar="FOLDER",
                help="the published model whose files, names and types are kept (default: the start.weights "
                "of the run, or the folder of --encoder)",
            )
            action.add_argument(
                "--encoder", metavar="NAME", help="with --as hf: this encoder of model.encoders, and no LLM"
            )


def run(arguments: argparse.Namespace) -> int:
    """Returns 1 where a checkpoint is damaged, 2 where there is none of those that are asked for."""
    from infra.checkpoint import CheckpointError, complete

    try:
        storage = _storage(arguments.run)
        steps = complete(storage)
        if not steps:
            raise ValueError(f"there is no checkpoint in {storage}")
        if arguments.step is not None and arguments.step not in steps:
            raise ValueError(f"--step {arguments.step}: {storage} has those of steps {steps}")
        chosen = steps if arguments.step is None else [arguments.step]
        if arguments.action == "export":
            check_out("--out", arguments.out, folder=arguments.form == "hf")
            if arguments.encoder and arguments.form != "hf":
                raise ValueError(f"--encoder {arguments.encoder} without --as hf: a file holds all weights")
            with writing("--out", arguments.out):
                if arguments.encoder:
                    return _export_encoder(storage, chosen[-1], arguments)
                if arguments.form == "hf":
                    return _export_folder(storage, chosen[-1], arguments)
                return _export(storage, chosen[-1], arguments.out)
        return max(
            [_verify(storage, s) if arguments.action == "verify" else _show(storage, s) for s in chosen]
        )
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _storage(run: str) -> "Storage":
    from dataloader.storage import Storage
    from infra.run_folder import RunFolder
    from omni.compose import load_config
    from omni.training.storage import storage_of

    folder = RunFolder(Path(run).absolute())
    return storage_of(load_config(folder.config), folder) if folder.config.exists() else Storage.at(run)


def _verify(storage: "Storage", step: int) -> int:
    from infra.checkpoint import DamagedError, folder_of, verify

    try:
        manifest = verify(storage, step)
    except (DamagedError, FileNotFoundError) as error:
        print(f"{folder_of(step)}: DAMAGED: {error}")
        return 1
    size = sum(size for size, _ in manifest["files"].values())
    print(f"{folder_of(step)}: good, {len(manifest['files'])} files, {size:,} bytes")
    return 0


def _show(storage: "Storage", step: int) -> int:
    from infra.checkpoint import DamagedError, folder_of, read_manifest

    try:
        manifest = read_manifest(storage, step)
    except DamagedError as error:
        print(f"{folder_of(step)}: DAMAGED: {error}")
        return 1
    print("\n".join(lines(manifest)))
    return 0


def lines(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Say what a checkpoint holds."""
    sizes = [size for size, _ in manifest["files"].values()]
    yield f"step {manifest['step']} of run {manifest['run']}: position {manifest['cursor']} in the stream"
    yield f"  written by {len(sizes)} ranks, {manifest['layout']}"
    yield f"  {sum(sizes):,} bytes, at most {max(sizes):,} a rank"
    shapes = {key: of[0] for held in manifest["index"] for key, of in held["parameters"].items()}
    trained = {key: of[5] for held in manifest["index"] for key, of in held["parameters"].items()}
    elements, count, moments = Counter[str](), Counter[str](), Counter[str]()
    for key, shape in shapes.items():
        component = key.partition("/")[0]
        elements[component] += prod(shape)
        count[component] += 1
        moments[component] += trained[key]
    for component in elements:
        with_state = f"{moments[component]} with the state of AdamW"
        yield f"  {component}: {elements[component]:,} parameters in {count[component]} tensors, {with_state}"
    buffers = sorted({name for held in manifest["index"] for name in held["buffers"]})
    if buffers:
        yield f"  biases of experts of {len(buffers)} layers"


def _export(storage: "Storage", step: int, out: Path) -> int:
    from infra.checkpoint import read_manifest
    from omni.training.export import export

    count = export(storage, read_manifest(storage, step), make_room(out))
    print(f"{out}: {count} tensors of step {step}, {out.stat().st_size:,} bytes")
    return 0


def _export_folder(storage: "Storage", step: int, arguments: argparse.Namespace) -> int:
    from infra.checkpoint import read_manifest
    from infra.run_folder import RunFolder
    from omni.compose import load_config
    from omni.config import ConfigError
    from omni.open_models.folder import open_folder, other_file
    from omni.training.export_folder import export_folder

    folder = RunFolder(Path(arguments.run).absolute())
    like = arguments.like or (load_config(folder.config).start.weights if folder.config.exists() else None)
    if like is None:
        raise ConfigError(
            f"{arguments.run} did not begin with start.weights: name with --like the folder of the model"
        )
    source = open_folder(like)
    if arguments.like is None and folder.weights.exists():
        began = json.loads(folder.weights.read_text(encoding="utf-8"))["files"]
        if (name := other_file(began, source.identity())) is not None:
            raise ConfigError(
                f"start.weights={like}: {name} is not the file that the run began with. Bring it back, or "
                f"name with --like the folder that the export is to be as"
            )
    encoders, left = _encoders(folder, like)
    count = export_folder(storage, read_manifest(storage, step), source, arguments.out, encoders)
    _tell_of_folder(arguments.out, count, step, source, like)
    for name in left:
        print(
            f"note: {name} is not of this folder, and not written; omni checkpoint export without --as has it"
        )
    return 0


def _export_encoder(storage: "Storage", step: int, arguments: argparse.Namespace) -> int:
    from infra.checkpoint import read_manifest
    from infra.run_folder import RunFolder
    from omni.compose import load_config
    from omni.config import ConfigError
    from omni.models.registry import make_encoder, published
    from omni.training.export_folder import export_folder

    folder, name = RunFolder(Path(arguments.run).absolute()), arguments.encoder
    encoders = load_config(folder.config).model.encoders if folder.config.exists() else {}
    own = encoders.get(name)
    if not own or "folder" not in own:
        held = ", ".join(key for key, of in encoders.items() if "folder" in of) or "none"
        raise ConfigError(
            f"--encoder {name}: {arguments.run} has no such encoder with a folder (it has {held}): name one, "
            f"and a run folder"
        )
    like = arguments.like or own["folder"]
    source = published(name, make_encoder(name, {**own, "folder": like, "weights": True}))
    assert source is not None
    count = export_folder(storage, read_manifest(storage, step), source, arguments.out, component=name)
    _tell_of_folder(arguments.out, count, step, source, like)
    return 0


def _tell_of_folder(out: Path, count: int, step: int, source: "Folder", like: str) -> None:
    from omni.training.export_folder import left_behind

    print(f"{out}: {count} tensors of step {step}, as in {like}")
    if left := left_behind(source):
        print(f"note: of {like} is not copied: {', '.join(left)}")


def _encoders(folder: "RunFolder", like: str) -> "tuple[dict[str, Folder], list[str]]":
    """Of the encoders of a run those that lie in the folder with the LLM, with what of `like` they are, and
    the others.
    """
    from omni.compose import load_config
    from omni.models.registry import make_encoder, published

    if not folder.config.exists():
        return {}, []
    config, found = load_config(folder.config), {}
    for name, own in config.model.encoders.items():
        if own.get("folder") and _same(own["folder"], config.start.weights or like):
            encoder = make_encoder(name, {**own, "folder": like, "weights": True})
            found[name] = published(name, encoder)
    kept = {name: of for name, of in found.items() if of is not None}
    return kept, [name for name in config.model.encoders if name not in kept]


def _same(one: str, other: str) -> bool:
    return Path(one).absolute() == Path(other).absolute()
