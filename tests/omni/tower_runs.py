"""Small runs with published towers, for tests and benchmarks."""

from pathlib import Path

import torch
from small import write_mixed
from sound import recording, tone
from test_attach_points import CHEAP_LINKS
from tower_folders import ALL

from dataloader.format import PLACEHOLDER, Sample
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.planning.prepare import prepare_run
from omni.training import parity
from omni.training.parity import Measurement

CPU = torch.device("cpu")
TP = ("layout.llm.tp=2", "+layout.encoders.image.tp=2")
SHARED = ("layout.domain=2", "encoder_sp=all", *CHEAP_LINKS)


def line(data: Path, tower: str, folder: Path, run: Path, keys: str, *more: str) -> list[str]:
    """The command line of a small run with a tower of a folder."""
    modality = "audio" if tower == "Whisper" else "image"
    return [
        *("~experiment", "system=multiplexed", "+model/llm=tiny", "model.llm.hidden=64", "model.llm.ffn=96"),
        f"+model.encoders.{modality}={{name: {ALL[tower][1]}, folder: {folder}, {keys}}}",
        *(f"+data.sources.mixed.path={data}", "data.microbatch_tokens=256", "data.step_samples=8"),
        *("train.steps=3", "train.precision=fp32", "train.timeout_s=60"),
        *("optim.lr=1e-3", "optim.eps=1e-4", "tracking=jsonl", f"run.dir={run}"),
        *more,
    ]


def measure(rank: int, keys: list[str], world: int) -> Measurement | None:
    spec = prepare_run(compose_config(keys), world)
    folder = RunFolder.create(Path(spec.config.run.dir))
    return parity.measure(spec, folder, rank, CPU, steps=spec.config.train.steps)


def write_data(tower: str, path: Path) -> None:
    """Uneven pictures or recordings, and texts without."""
    if tower != "Whisper":
        return write_mixed(path)
    with DatasetWriter(path, ByteTokenizer(), rows_per_group=4) as writer:
        for number, samples in enumerate((1600, 16000, 401, 9000, 12000)):
            item = recording(tone(100 * number + 300, samples, 16000), 16000)
            writer.add(Sample(f"tone{number}", f"{PLACEHOLDER}a tone of {number}", (item,)))
        writer.add(Sample("none", "no recording"))
    return None
