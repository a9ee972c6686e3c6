"""Plans of processes that hash strings differently: an order taken from a set of names is no order.

Ranks of other tests are forked from one process and share its hashes, so they would agree in such an order.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from own_policies import PYPROJECT, entry_points_of
from small import WORDS, image, overrides, with_values
from sound import recording, tone
from torch.distributed import TCPStore

from dataloader.format import PLACEHOLDER, Sample
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from infra.run_folder import RunFolder, read_metrics
from omni.compose import compose_config, load_config
from omni.config import Config, EncoderLayoutConfig
from omni.planning.prepare import prepare_run
from omni.policies import KINDS
from parallel.handshake import SECRET, new_secret

HERE = Path(__file__).parent
SEEDS = ("0", "1", "4242")
LAYOUTS = (
    {"layout.llm.pp": 2, "layout.domain": 2},
    {"layout.llm.tp": 2, "layout.domain": 2, "layout.encoders.audio": EncoderLayoutConfig(tp=2)},
    {"layout.llm.cp": 2, "layout.domain": 4, "balance.group": 1},
)
AUDIO = ("sample_rate=8000", "n_fft=128", "hop=64", "mels=16", "merge=2", "hidden=32", "heads=2", "ffn=64")
COMMON = (
    *(f"model.encoders.audio.{key}" for key in AUDIO),
    "+optim.components={audio: {frozen: [[2, 3]]}}",
    # Links that cost nothing, so that it pays to share items as short as these.
    "cluster.ranks_per_node=2",
    "cluster.link_latency_ns=0",
    "cluster.node_link_latency_ns=0",
    "cluster.op_overhead_ns=0",
)


def composed(data: Path) -> Config:
    """A run with two encoders on two sources."""
    sources = [f"+data.sources.{name}={{path: {data / name}, weight: 2}}" for name in ("heard", "seen")]
    line = overrides(data, data / "run", *sources, *COMMON, samples=16)
    line[line.index("model=tiny")] = "model=tiny_audio_vision"
    return compose_config([key for key in line if "sources.mixed" not in key])


def cases(config: Config) -> Iterator[tuple[int, Config]]:
    """Ranks and configurations in which every policy of ours occurs."""
    choices = {
        f"{section}.policy": [
            name
            for name in entry_points_of(PYPROJECT, kind.group)
            if (section, name) != ("encoder_sp", "uniform")  # for the LLM alone
        ]
        for section, kind, _ in KINDS
    }
    for number in range(max(map(len, choices.values()))):
        chosen = {key: names[number % len(names)] for key, names in choices.items()}
        if chosen["packing.policy"] == "entrain":
            chosen["pairing.policy"] = "in_order"  # it is refused with any other
        beside = 4 if chosen["placement.policy"] == "disaggregated" else None
        values = {**chosen, **LAYOUTS[number % len(LAYOUTS)], "placement.ranks": beside}
        yield 8 + (beside or 0), with_values(config, values)


def print_digests(file: str) -> None:
    """Print the digests of all domains' plans of two steps of every case, as a rank would plan them."""
    found = []
    for world, config in cases(load_config(Path(file))):
        planner = prepare_run(config, world).planner
        for domain in range(planner.domain.arrangement.num_domains):
            first = planner.next_step(1, 0, domain)
            second = planner.next_step(2, first.taken.next_cursor, domain)
            found.append([*first.digests, *second.digests])
    print(json.dumps(found))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("hashes")
    rng = np.random.default_rng(0)
    for source in ("heard", "seen"):
        with DatasetWriter(folder / source, ByteTokenizer(), rows_per_group=4) as writer:
            for number in range(10):
                text = PLACEHOLDER + " ".join(rng.choice(WORDS, 1 + number))
                sound = recording(tone(440, 2000 * (1 + number % 3), 8000), 8000)
                item = sound if source == "heard" else image(rng, 8, 8 * (1 + number % 5))
                writer.add(Sample(f"{source}{number}", text, (item,)))
    return composed(folder)


def environment(seed: str) -> dict[str, str]:
    """That of a process which hashes strings by `seed` and finds our modules."""
    paths = [str(HERE), str(HERE.parent), str(HERE.parents[1]), *sys.path]
    return {
        **os.environ,
        "PYTHONHASHSEED": seed,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def write(config: Config, folder: Path) -> Path:
    file = RunFolder.create(folder).config
    file.write_text(OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True))
    return file


def test_plans_are_the_same_whatever_the_hashes_of_strings(config: Config, tmp_path: Path) -> None:
    file = write(config, tmp_path)
    code = f"import test_string_hashes as here; here.print_digests({str(file)!r})"
    found = [
        subprocess.run(
            [sys.executable, "-c", code], env=environment(seed), stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        for seed in SEEDS
    ]
    assert found == [found[0]] * len(SEEDS)
    assert len({tuple(digests) for digests in json.loads(found[0])}) > len(LAYOUTS)


def test_ranks_with_hashes_of_their_own_train_together(config: Config, tmp_path: Path) -> None:
    file = write(with_values(config, {"layout.llm.pp": 2, "train.steps": 2}), tmp_path)
    # As under torchrun the store is not theirs: a port that is free when asked may be taken when they listen.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    world |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", SECRET: new_secret()}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "omni.training.worker", str(file)],
            env={**environment(seed), **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, seed in enumerate(SEEDS[:2])
    ]
    try:
        assert [process.wait(300) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    assert [record["progress/step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
