"""The audio encoder alone, and beside the image encoder: two encoders at once in front of one LLM."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from planners import plans_of_all_domains
from ranks import RankPool
from small import overrides, write_mixed
from sound import chirp, encoded, recording, tone
from test_parity import assert_equal, run

from dataloader.format import PLACEHOLDER, Item, Sample, SampleError
from dataloader.recipes.from_jsonl import build_from_jsonl
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from infra.run_folder import RunFolder, read_metrics
from omni.commands.plan import plan_of_step
from omni.compose import compose_config
from omni.config import Config, ConfigError
from omni.models.encoders.audio import AudioConfig, AudioEncoder
from omni.models.encoders.audio_stem import sinusoids, spaced
from omni.models.registry import ItemArrays, make_encoder, registered
from omni.planning.prepare import prepare_run
from omni.rehearsal.footprint_model import model_footprint
from omni.rehearsal.rehearse import rehearse
from omni.training.parity import Measurement, compare
from omni.training.trainer import Trainer
from parallel.packed import Sharding
from parallel.work import even_load

SMALL = {"sample_rate": 8000, "n_fft": 128, "hop": 64, "mels": 16, "merge": 2}  # 256 samples a row
NOISE = np.random.default_rng(0).uniform(-0.5, 0.5, 20_000).astype(np.float32)


def line_of(data: Path, folder: Path, *more: str, samples: int = 10) -> list[str]:
    """The command line of a small run with both encoders."""
    sizes = {**SMALL, "hidden": 32, "heads": 2, "ffn": 64}
    line = overrides(data, folder, *more, samples=samples)
    line[line.index("model=tiny")] = "model=tiny_audio_vision"
    return [*line, *(f"model.encoders.audio.{key}={value}" for key, value in sizes.items())]


def write_heard_and_seen(folder: Path) -> Path:
    """Images, recordings at several rates, both at once and neither: files, a JSONL file and its dataset."""
    rng = np.random.default_rng(0)
    files = {
        "sine.wav": encoded(tone(440, 1000, 8000), 8000),
        "chirp.flac": encoded(chirp(100, 3000, 6000, 16000), 16000, "flac"),
        "stereo.wav": encoded(np.stack([tone(300, 900, 11025), tone(900, 900, 11025)], 1), 11025),
        "long.flac": encoded(chirp(2000, 50, 22050, 44100), 44100, "flac"),
        "click.wav": encoded(np.float32([0.5]), 8000),
    }
    for name, (height, width) in {"a.png": (8, 16), "b.png": (8, 40), "c.png": (16, 24)}.items():
        out = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (height, width), dtype=np.uint8)).save(out, "PNG")
        files[name] = out.getvalue()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    samples = [
        ("[]a low tone", "sine.wav"),
        ("[]it rises", "chirp.flac"),
        ("[]strip", "a.png"),
        ("heard [] and seen [].", "stereo.wav", "b.png"),
        ("only text, nothing else to learn from",),
        ("seen [] then heard [] and again [].", "c.png", "click.wav", "sine.wav"),
        ("[]it falls for a while", "long.flac"),
        ("[]", "b.png"),
        ("more text",),
        ("[][]", "click.wav", "a.png"),
    ]
    lines = []
    for i, (text, *paths) in enumerate(samples):
        items = [{"modality": "image" if path.endswith("png") else "audio", "path": path} for path in paths]
        lines.append({"id": f"s{i}", "text": text.replace("[]", PLACEHOLDER), "items": items})
    (folder / "samples.jsonl").write_text("\n".join(map(json.dumps, lines)))
    build_from_jsonl(folder / "samples.jsonl", folder / "dataset", ByteTokenizer(), rows_per_group=4)
    return folder / "dataset"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heard_and_seen(tmp_path_factory.mktemp("audio"))


# The description


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6000),
    st.sampled_from([8000, 11025, 16000, 22050, 44100, 48000]) | st.integers(4000, 100_000),
    st.sampled_from([AudioConfig(), AudioConfig(**SMALL), AudioConfig(merge=1), AudioConfig(merge=3)]),
)
def test_preprocessing_gives_the_counted_tokens(samples: int, rate: int, config: AudioConfig) -> None:
    encoder = AudioEncoder(config)
    tokens, rows = encoder.count((samples, rate))
    arrays = encoder.preprocess(encoder.decode(recording(NOISE[:samples], rate, "wav")))
    assert arrays.values.shape == (tokens, 2 * config.mels)
    assert arrays.values.dtype == np.float32
    assert arrays.positions[:, 0].tolist() == list(range(tokens))
    assert tokens == rows * config.merge
    assert encoder.unit is None, "a recording is never split"
    # Whole windows, and none without sound.
    assert (rows - 1) * encoder.window < max(1, round(samples * config.sample_rate / rate)) + 1
    assert rows * encoder.window >= samples * config.sample_rate / rate - 1


def test_the_defaults_give_50_tokens_and_12_rows_a_second() -> None:
    encoder = AudioEncoder(AudioConfig())
    assert encoder.count((16000 * 8, 16000)) == (400, 100)
    assert encoder.count((44100 * 8, 44100)) == (400, 100)
    assert encoder.count((16000 * 8 + 1, 16000)) == (404, 101)
    assert encoder.count((1, 48000)) == (4, 1)


def test_a_token_holds_its_two_frames_and_padding_is_silent() -> None:
    encoder = AudioEncoder(AudioConfig())
    sound = np.zeros(2 * encoder.window - 100, np.float32)
    sound[:160] = tone(1000, 160, 16000)  # heard in frames 0 to 2: a frame reaches 200 samples to each side
    values = encoder.preprocess(sound).values.reshape(-1, 80)
    loud = values.max(1) > values.min() + 0.5
    assert np.flatnonzero(loud).tolist() == [0, 1, 2]
    assert (values[3:] == values.min()).all()


def test_blank_is_an_item() -> None:
    encoder = AudioEncoder(AudioConfig())
    assert len(encoder.preprocess(encoder.blank()).values) == encoder.config.merge


@pytest.mark.parametrize("kind", ["wav", "flac"])
def test_a_corrupt_recording_is_a_sample_error(kind: str) -> None:
    encoder = AudioEncoder(AudioConfig())
    item = recording(NOISE, 16000, kind)
    for data in (item.data[: len(item.data) // 2], b"\0" * len(item.data), item.data[:3]):
        with pytest.raises(SampleError):
            encoder.decode(Item("audio", kind, item.size, data))


def test_the_encoder_is_registered_and_refuses_sizes_that_do_not_fit() -> None:
    assert "audio" in registered()
    assert isinstance(make_encoder("audio", {"name": "audio", "layers": 3}), AudioEncoder)
    for options, words in (
        ({"heads": 3}, "heads=3"),
        ({"hidden": 12, "heads": 4}, "hidden=12"),
        ({"recompute": "some"}, "recompute=some"),
        ({"merge": 0}, "merge=0"),
        ({"rotary_base": 0.0}, "rotary_base=0"),
        ({"hop": 401}, "hop=401"),
        ({"mels": 200}, "mels=200: .* silent; lower mels"),
        ({"colour": 1}, "colour"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_encoder("audio", {"name": "audio", **options})


def test_a_mistake_in_one_of_two_encoders_says_in_which(tmp_path: Path) -> None:
    write_mixed(tmp_path / "data")
    keys = {
        "model.encoders.audio.heads=3": "model.encoders.audio.heads=3: ",
        "model.encoders.audio.hop=400": "model.encoders.audio.hop=400",
        "model.encoders.image.ffn=0": "model.encoders.image.ffn=0: ",
        "+model.encoders.image.taps=[7]": r"model.encoders.image.taps=\[7\]",
        "+layout.encoders.audio.tp=4": "layout.encoders.audio.tp=4 .* model.encoders.audio.heads=2",
    }
    for key, words in keys.items():
        line = [*line_of(tmp_path / "data", tmp_path / "run"), key]
        with pytest.raises(ConfigError, match=words):
            prepare_run(compose_config(line), 4)


def test_work_counts_the_multiplications() -> None:
    """Against the FLOPs that torch counts, per token; attention by the square apart."""
    from torch.utils.flop_counter import FlopCounterMode

    config = AudioConfig(hidden=32, layers=1)
    stem = torch.nn.Sequential(
        torch.nn.Conv1d(80, 32, 3, padding=1), torch.nn.Conv1d(32, 32, 3, stride=2, padding=1)
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        stem(torch.zeros(1, 80, 200))
    work, no_stem = AudioEncoder(config).work(64, 4).forward(even_load(100)), 2 * 128 * 128 // 4
    layer = 2 * (4 * 32 * 32 + 2 * 32 * 192)
    assert work.flops == 100 * (layer + no_stem) + counter.get_total_flops()


@pytest.mark.parametrize(
    ("world", "rank", "more"),
    [
        (2, 1, ["layout.llm.pp=2"]),
        (4, 0, ["+layout.encoders.audio.tp=2", "+layout.encoders.image.tp=2", "layout.llm.pp=2"]),
        (3, 2, ["placement=disaggregated", "placement.ranks=2"]),
        (2, 1, ["placement=disaggregated", "placement.ranks=1", "model.encoders.audio.recompute=full"]),
    ],
)
def test_the_statement_of_both_encoders_is_what_a_rehearsal_measures(
    data: Path, tmp_path: Path, world: int, rank: int, more: list[str]
) -> None:
    line = line_of(data, tmp_path, "train.precision=bf16", *more)
    spec = prepare_run(compose_config(line), world)
    plan = plan_of_step(spec, 1, spec.arrangement.domain(rank))
    found, modelled = rehearse(spec, plan, rank).footprint, model_footprint(spec, plan, rank)
    assert modelled.traffic == found.traffic
    assert modelled.parameters == found.parameters
    assert modelled.bytes == pytest.approx(found.bytes, rel=0.02)


# The module


def test_an_empty_token_is_put_before_each_recording() -> None:
    edges = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    assert spaced(edges, 6).tolist() == [1, 2, 3, 5, 7, 8]
    assert spaced(torch.tensor([0], dtype=torch.int32), 0).tolist() == []


def test_sinusoids_are_those_of_the_paper() -> None:
    found = sinusoids(torch.tensor([0, 7, 4000]), 6)
    for row, position in zip(found, (0, 7, 4000), strict=True):
        angles = [position / 10000 ** (2 * i / 6) for i in range(3)]
        assert row.tolist() == pytest.approx([*np.sin(angles), *np.cos(angles)], abs=1e-3)


def _rows(rank: int, config: Config) -> dict[str, torch.Tensor]:
    """Encode recordings of several lengths: together, alone, in another order, behind others."""
    from omni.rank.build import build_rank

    spec = prepare_run(config, 1)
    built = build_rank(spec, rank, torch.device("cpu"), lambda op: None)
    encoder, module = spec.encoders["audio"], built.components["audio"].modules[0]
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():  # biases begin at zero, and would hide what they leak
            parameter.add_(0.1 * torch.randn_like(parameter))
    # Loud to the last sample, so that whatever reads across an edge reads something.
    ready = [encoder.preprocess(NOISE[:samples]) for samples in (512, 2048, 256, 1280)]
    loud_first = encoder.preprocess(np.concatenate([NOISE[::-1][:512], NOISE[:256]]))

    def encode(items: list[ItemArrays]) -> torch.Tensor:
        values = torch.cat([torch.from_numpy(item.values) for item in items])
        where = torch.cat([torch.from_numpy(item.positions) for item in items])
        lengths = [len(item.values) for item in items]
        packed = encoder.pack(Sharding.whole(lengths), where, torch.float32, torch.device("cpu"))
        with torch.no_grad():
            return module(values, where, packed)

    return {
        "together": encode(ready),
        "alone": torch.cat([encode([item]) for item in ready]),
        "shuffled": encode([ready[3], ready[1], ready[0], ready[2]]),
        "behind others": encode([loud_first, *ready])[3:],
    }


def test_recordings_in_a_pack_do_not_see_each_other(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    rows = ranks.run(1, _rows, compose_config(line_of(data, tmp_path)))[0]
    assert rows["alone"].shape == (2 + 8 + 1 + 5, 64)
    torch.testing.assert_close(rows["together"], rows["alone"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rows["behind others"], rows["alone"], rtol=1e-4, atol=1e-5)
    first, second, third, fourth = rows["alone"].split([2, 8, 1, 5])
    expected = torch.cat([fourth, second, first, third])
    torch.testing.assert_close(rows["shuffled"], expected, rtol=1e-4, atol=1e-5)
    assert rows["alone"].std() > 1e-3


def _stems(rank: int, config: Config) -> list[torch.Tensor]:
    """The stem of packed recordings, and torch's own convolutions of each by itself."""
    from omni.rank.build import build_rank

    spec = prepare_run(config, 1)
    built = build_rank(spec, rank, torch.device("cpu"), lambda op: None)
    module = built.components["audio"].modules[0]
    torch.manual_seed(0)
    lengths = [4, 2, 10]
    values = torch.randn(sum(lengths), 32)
    gelu = torch.nn.functional.gelu
    with torch.no_grad():
        module.stem_in.bias.normal_()
        packed = module.stem.convolved(values, torch.tensor([0, *np.cumsum(lengths)]))
        frames = [item.reshape(1, -1, 16).transpose(1, 2) for item in values.split(lengths)]
        alone = [gelu(module.stem_out(gelu(module.stem_in(item))))[0].T for item in frames]
    return [packed, torch.cat(alone)]


def test_the_stem_pads_each_recording_with_zeros(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    packed, alone = ranks.run(1, _stems, compose_config(line_of(data, tmp_path)))[0]
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-6)


# Training


def test_the_batch_holds_both_kinds_on_both_ranks(data: Path, tmp_path: Path) -> None:
    spec = prepare_run(compose_config(line_of(data, tmp_path, "layout=pp2")), 2)
    domain = spec.planner.next_step(1, 0, 0).domain
    assert {(batch.component, rank) for batch in domain.encoder_batches for rank in batch.ranks} == {
        (component, rank) for component in ("audio", "image") for rank in (0, 1)
    }
    both = [
        {c.component for c in domain.encoder_batches if m in c.microbatches}
        for m in range(len(domain.microbatches))
    ]
    assert {"audio", "image"} in both


_reference: list[Measurement] = []


def reference(ranks: RankPool, data: Path, folder: Path) -> Measurement:
    if not _reference:
        _reference.append(run(ranks, line_of(data, folder / "reference"), 1))
    return _reference[0]


@pytest.mark.parametrize(
    ("world", "more"),
    [
        (2, []),
        (2, ["layout=pp2"]),
        (2, ["layout=pp2", "system=megatron"]),
        (2, ["layout=pp2", "pipeline=one_f_one_b", "model.encoders.audio.recompute=full"]),
        (4, ["layout=pp2"]),
    ],
    ids=["dp2", "pp2", "pp2 stage0", "pp2 one_f_one_b recompute", "dp2 pp2"],
)
def test_two_encoders_equal_one_rank(
    ranks: RankPool, data: Path, tmp_path: Path, world: int, more: list[str]
) -> None:
    expected = reference(ranks, data, tmp_path)
    assert_equal(expected, run(ranks, line_of(data, tmp_path / "candidate", *more), world))


def of_encoders(image: int, audio: int) -> list[str]:
    return [f"+layout.encoders.image.tp={image}", f"+layout.encoders.audio.tp={audio}"]


TP2_PP2 = ["layout.llm.tp=2", "layout.llm.pp=2"]
BESIDE = ["layout.llm.tp=2", "placement=disaggregated"]
OWN_LAYOUTS = {
    "tp2 pp2, image tp2": (4, [*TP2_PP2, *of_encoders(2, 1)]),
    "tp2 pp2, audio tp2": (4, [*TP2_PP2, *of_encoders(1, 2)]),
    "pp2 dp2, audio tp2 one_f_one_b": (4, ["layout=pp2", "pipeline=one_f_one_b", *of_encoders(1, 2)]),
    "tp2 beside 2, image tp2": (4, [*BESIDE, "placement.ranks=2", *of_encoders(2, 1)]),
    "tp2 pp2 beside 2, audio tp2": (6, [*BESIDE, "layout.llm.pp=2", "placement.ranks=2", *of_encoders(1, 2)]),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=pytest.mark.slow) if OWN_LAYOUTS[c][0] > 4 else c for c in OWN_LAYOUTS],
)
def test_encoders_with_layouts_of_their_own_equal_one_rank(
    ranks: RankPool, data: Path, tmp_path: Path, case: str
) -> None:
    world, more = OWN_LAYOUTS[case]
    expected = reference(ranks, data, tmp_path)
    assert_equal(expected, run(ranks, line_of(data, tmp_path / "candidate", *more), world))


@pytest.mark.parametrize("case", OWN_LAYOUTS)
def test_in_these_layouts_tp_groups_of_both_encoders_have_items(
    data: Path, tmp_path: Path, case: str
) -> None:
    world, more = OWN_LAYOUTS[case]
    spec = prepare_run(compose_config(line_of(data, tmp_path, *more)), world)
    plans = plans_of_all_domains(spec.planner, 1, 0)
    encoder_batches = [batch for plan in plans for batch in plan.domain.encoder_batches]
    sizes = {
        component: {c.tp for c in encoder_batches if c.component == component}
        for component in ("audio", "image")
    }
    assert sizes == {name: {layout.tp} for name, layout in spec.config.layout.encoders.items()}
    ones = {c.ranks for c in encoder_batches if c.tp == 1}
    assert len(ones) > 1, "the encoder with tp1 is on several tp groups"


def test_every_weight_of_both_encoders_learns(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    gradients = reference(ranks, data, tmp_path).gradients
    for component in ("audio", "image"):
        names = [name for name in gradients if name.startswith(component + "/")]
        assert len(names) > 10
        assert all(gradients[name].norm() > 0 for name in names), component


@pytest.mark.parametrize("frozen", ["audio", "image"])
def test_one_of_two_encoders_is_frozen(ranks: RankPool, data: Path, tmp_path: Path, frozen: str) -> None:
    more = f"+optim.components={{{frozen}: {{frozen: [[1, 3]]}}}}"
    one = run(ranks, line_of(data, tmp_path / "reference", more), 1)
    two = run(ranks, line_of(data, tmp_path / "candidate", more, "layout=pp2"), 2)
    assert {name.partition("/")[0] for name in one.gradients} == {"llm", "audio", "image"} - {frozen}
    assert_equal(one, two)


def _train(rank: int, config: Config) -> None:
    spec = prepare_run(config, 2)
    Trainer(spec, RunFolder.create(Path(spec.config.run.dir)), rank, torch.device("cpu")).run()


def test_a_recording_of_another_pitch_gives_another_loss(ranks: RankPool, tmp_path: Path) -> None:
    measurements = []
    for hz in (300, 1200):
        with DatasetWriter(tmp_path / f"{hz}", ByteTokenizer()) as writer:
            writer.add(Sample("a", f"{PLACEHOLDER}tone", (recording(tone(hz, 2000, 8000), 8000),)))
        line = line_of(tmp_path / f"{hz}", tmp_path / f"run{hz}", samples=1)
        measurements.append(run(ranks, line, 1))
    assert compare(*measurements)[0].relative > 1e-3


def test_a_recording_that_cannot_be_decoded_is_skipped(ranks: RankPool, tmp_path: Path) -> None:
    whole = recording(NOISE, 8000, "flac")
    cut = Item("audio", "flac", whole.size, whole.data[:2000])
    with DatasetWriter(tmp_path / "cut", ByteTokenizer()) as writer:
        writer.add(Sample("whole", f"{PLACEHOLDER}noise", (whole,)))
        writer.add(Sample("cut", f"{PLACEHOLDER}less noise", (cut,)))
        writer.add(Sample("text", "none"))
    more = ("layout=pp2", "data.on_error=skip", "data.max_error_share=1", "train.steps=2")
    ranks.run(2, _train, compose_config(line_of(tmp_path / "cut", tmp_path / "run", *more, samples=3)))
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [m["data/skipped/bad_item"] for m in metrics] == [1, 2]
    assert all(np.isfinite(m["optim/grad_norm"]) for m in metrics)


def write_pitches(path: Path) -> None:
    """Tones of four pitches in noise, each named by a letter: nothing but the sound tells which."""
    rng = np.random.default_rng(0)
    with DatasetWriter(path, ByteTokenizer(), rows_per_group=4) as writer:
        for i in range(64):
            samples = int(rng.integers(500, 1500))
            sound = tone(300 * 2 ** (i % 4), samples, 8000) + rng.normal(0, 0.02, samples)
            item = recording(sound.astype(np.float32), 8000, ("wav", "flac")[i // 4 % 2])
            writer.add(Sample(f"p{i}", PLACEHOLDER + "abcd"[i % 4], (item,)))


@pytest.mark.slow
def test_training_learns_to_hear(ranks: RankPool, tmp_path: Path) -> None:
    write_pitches(tmp_path / "pitches")
    more = ("layout=pp2", "train.steps=120", "optim.lr=4e-3", "optim.eps=1e-8", "optim.weight_decay=0")
    ranks.run(2, _train, compose_config(line_of(tmp_path / "pitches", tmp_path / "run", *more, samples=16)))
    losses = [m["loss/train"] for m in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert losses[0] > 4
    # A letter and the end of the sample: who cannot hear pays at least log(4) for the first of the two.
    assert np.mean(losses[-5:]) < 0.5 * np.log(4) / 2, losses
