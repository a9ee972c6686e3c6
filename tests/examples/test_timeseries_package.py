"""The example of an encoder in a package of its own: installed into a folder, and trained on real ranks."""

import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_timeseries.encoder import TimeSeriesConfig, TimeSeriesEncoder
from omni_timeseries.make_data import describe, make_sample, make_series, to_item
from omni_timeseries.policies import SNAKE
from packages import pip_install
from ranks import RankPool
from runs import Finished, Running, read_lines
from samples import bins_of, samples_of
from torch.utils.flop_counter import FlopCounterMode

from dataloader.format import PLACEHOLDER, Item, Sample, SampleError
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from infra.run_folder import RunFolder
from omni.commands.plan import plan_of_step
from omni.compose import compose_config
from omni.config import ConfigError
from omni.encoder_modules import Sharding
from omni.encoders import attention_flops, check_keys
from omni.models.initialise import initialise
from omni.models.regions import Numbering
from omni.planning.prepare import prepare_run
from omni.rehearsal.footprint_model import model_footprint
from omni.rehearsal.rehearse import rehearse
from omni.training import parity
from omni.training.parity import TOLERANCE, WEIGHT_TOLERANCE, Measurement, compare, compare_weights
from parallel.work import Grad, even_load

EXAMPLE = Path(__file__).parents[2] / "examples/timeseries"
TARGET = "omni_timeseries.encoder.TimeSeriesEncoder"
SMALL = (
    "model.llm.layers=2",
    "model.llm.hidden=32",
    "model.llm.heads=2",
    "model.llm.kv_heads=1",
    "model.llm.ffn=64",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the package is installed, as pip would into an environment."""
    return pip_install(EXAMPLE, tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, site: Path) -> Path:
    """What the package's own command writes."""
    folder = tmp_path_factory.mktemp("data")
    arguments = ["-m", "omni_timeseries.make_data", "--out", "series", "--num", "64", "--num-heldout", "8"]
    done = Running(arguments, folder, {"PYTHONPATH": str(site)}).finish()
    assert done.code == 0, done.err
    return folder / "series"


def train(data: Path, cwd: Path, path: Path, *more: str) -> Finished:
    """`omni train` of the example's experiment, small, with packages found in `path`."""
    keys = [
        f"--config-dir={EXAMPLE / 'conf'}",
        "experiment=timeseries",
        "system=multiplexed",
        f"data.sources.series.path={data / 'train'}",
        f"data.heldout.series.path={data / 'heldout'}",
        "data.heldout.series.generate=0",
        "data.step_tokens=512",
        "train.eval_every=0",
        "train.checkpoint_every=0",
        "train.timeout_s=60",
        "optim.lr=1e-2",
        "optim.warmup_steps=0",
        "launch.ranks=2",
        "layout=pp2",
        "tracking=jsonl",
        "run.dir=run",
        *SMALL,
        *more,
    ]
    paths = os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return Running(["-m", "omni", "train", *keys], cwd, {"PYTHONPATH": paths}, fresh=True).finish()


def test_an_installed_encoder_trains_by_its_name(site: Path, data: Path, tmp_path: Path) -> None:
    done = train(data, tmp_path, site, "train.steps=30")
    assert done.code == 0, done.err
    losses = [record["loss/train"] for record in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == 30
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5]), losses


@pytest.mark.slow
def test_an_importable_encoder_trains_by_its_class(data: Path, tmp_path: Path) -> None:
    more = ("train.steps=3", "~model.encoders.series.name", f"+model.encoders.series._target_={TARGET}")
    done = train(data, tmp_path, EXAMPLE, *more)
    assert done.code == 0, done.err
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 3


def test_without_the_package_the_refusal_names_the_encoder_and_the_remedy(data: Path, tmp_path: Path) -> None:
    done = train(data, tmp_path, tmp_path, "train.steps=3")
    assert done.code == 2
    assert done.lines_with("model.encoders.series.name=timeseries", "Install the package", "omni.encoders")
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_an_installed_policy_is_chosen_on_the_command_line(site: Path, data: Path, tmp_path: Path) -> None:
    """`balance=snake` needs no file."""
    keys = [
        "--config-dir",
        str(EXAMPLE / "conf"),
        "experiment=timeseries",
        "system=multiplexed",
        f"data.sources.series.path={data / 'train'}",
        f"data.heldout.series.path={data / 'heldout'}",
        "launch.ranks=2",
        "balance=snake",
        *SMALL,
    ]
    paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = Running(["-m", "omni", "plan", "--json", *keys], tmp_path, {"PYTHONPATH": paths}).finish()
    assert done.code == 0, done.err
    assert "balance=snake" in json.loads(done.out)["policies"]


EVERY_KIND = (
    "deal=in_turn",
    "balance=snake",
    "packing=next_fit",
    "pairing=by_cost",
    "placement=last_stage",
    "llm_sp=by_two",
    "encoder_sp=by_two",
    "boundary=once_across",
    "pipeline=fill_and_drain",
)


def test_an_unknown_policy_is_refused_by_naming_the_installed_ones(
    site: Path, data: Path, tmp_path: Path
) -> None:
    paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    line = ["-m", "omni", "train", "experiment=quickstart", "balance=snail"]
    done = Running(line, tmp_path, {"PYTHONPATH": paths}).finish()
    assert done.code == 2
    assert "balance/snail" in done.err
    assert [name for name in ("lpt", "none", "snake") if name not in done.err] == []


def test_policies_of_every_kind_shape_the_plan(site: Path, data: Path, tmp_path: Path) -> None:
    keys = [
        "--config-dir",
        str(EXAMPLE / "conf"),
        "experiment=timeseries",
        "system=multiplexed",
        f"data.sources.series.path={data / 'train'}",
        f"data.heldout.series.path={data / 'heldout'}",
        "launch.ranks=4",
        "layout=pp2",
        "layout.domain=2",
        *EVERY_KIND,
        *SMALL,
    ]
    paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = Running(["-m", "omni", "plan", "--json", *keys], tmp_path, {"PYTHONPATH": paths}).finish()
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert set(EVERY_KIND) == set(found["policies"].split(", "))
    assert found["verifier"].startswith("accepted")
    shared = found["sequences_shared"], found["items_shared"]
    assert min(shared) > 0, "sequences of the LLM and items are cut in two"


def test_samples_are_dealt_back_and_forth() -> None:
    assert SNAKE(samples_of([9, 7, 5, 3, 1, 0, 8]), bins_of(3)) == (0, 2, 2, 1, 0, 0, 1)
    assert SNAKE(samples_of([]), bins_of(2)) == ()
    assert SNAKE(samples_of([4, 4, 4]), bins_of(1)) == (0, 0, 0)


def encoder(**keys: int) -> TimeSeriesEncoder:
    return TimeSeriesEncoder(TimeSeriesConfig(**keys))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(1, 4), st.integers(1, 9), st.integers(1, 4))
def test_preprocessing_gives_the_counted_tokens(steps: int, channels: int, patch: int, merge: int) -> None:
    made = encoder(channels=4, patch=patch, merge=merge)
    tokens, rows = made.count((steps, channels))
    arrays = made.preprocess(np.ones((steps, channels), np.float32))
    assert arrays.values.shape == (tokens, patch * 4)
    assert arrays.values.dtype == np.float32
    assert arrays.positions.shape == (tokens, 1)
    assert tokens == rows * merge == rows * made.unit
    assert (tokens - merge) * patch < steps <= tokens * patch


def test_patches_hold_the_normalised_series_and_zeros_where_there_is_none() -> None:
    series = np.random.default_rng(0).normal(5, 3, (10, 2)).astype(np.float32)
    steps = encoder(channels=3, patch=2, merge=3).preprocess(series).values.reshape(12, 3)
    np.testing.assert_allclose(steps[:10, :2].mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(steps[:10, :2].std(0), 1, rtol=1e-5)
    np.testing.assert_allclose(np.corrcoef(steps[:10, 1], series[:, 1])[0, 1], 1, rtol=1e-5)
    assert not steps[10:].any()
    assert not steps[:, 2].any()
    assert not encoder().preprocess(np.full((7, 3), 0.1, np.float32)).values.any()


def test_decoding_keeps_the_series_and_names_what_is_no_series() -> None:
    series = make_series(np.random.default_rng(0), 50, 3, fastest=1, period=12)
    item = to_item(series)
    np.testing.assert_array_equal(encoder().decode(item), series)
    np.testing.assert_array_equal(encoder().decode(to_item(series.astype(np.float64))), series)
    pickled, archive = io.BytesIO(), io.BytesIO()
    np.save(pickled, np.array([[{}]]), allow_pickle=True)
    np.savez(archive, series)
    broken = {
        "magic": b"not an array",
        "array data": item.data[:-1],
        "Object arrays": pickled.getvalue(),
        "can be read": archive.getvalue(),
        "header": item.data[:20],
        "its metadata says": to_item(series[:-1]).data,
        "store real numbers": to_item(series + 1j).data,
        "not finite": to_item(np.where(series > 0, np.nan, series)).data,
        "too large": to_item(series.astype(np.float64) * 1e300).data,
    }
    for words, damaged in broken.items():
        with pytest.raises(SampleError, match=words):
            encoder().decode(Item("timeseries", "npy", series.shape, damaged))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 400), st.integers(0, 255))
def test_a_damaged_byte_is_a_sample_error_or_another_series(place: int, value: int) -> None:
    item = to_item(np.ones((30, 3), np.float32))
    damaged = bytearray(item.data)
    damaged[place] = value
    try:
        decoded = encoder().decode(Item("timeseries", "npy", item.size, bytes(damaged)))
    except SampleError:
        return
    assert decoded.shape == item.size


def test_sizes_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(SampleError, match="channels=3"):
        encoder().count((10, 4))
    with pytest.raises(SampleError, match="steps, channels"):
        encoder().count((10,))
    with pytest.raises(ConfigError, match="heads=3"):
        check_keys("encoder", TimeSeriesConfig(hidden=64, heads=3))
    with pytest.raises(ConfigError, match=r"layout.encoders.series.tp=2: .*leave it at 1"):
        encoder().check_tp("layout.encoders.series.tp", 2)


def test_series_packed_together_equal_each_alone() -> None:
    made = encoder(hidden=32, heads=2, ffn=48)
    module = made.build(24, torch.float32, torch.device("cpu"), None).double()
    initialise(module, seed=0, component="series", num_layers=2, numbering=Numbering())
    rng = np.random.default_rng(0)
    series = [rng.normal(size=(steps, channels)).astype(np.float32) for steps, channels in SIZES]
    together = encode(made, module, series)
    alone = torch.cat([encode(made, module, [one]) for one in series])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
    assert len(together) == sum(made.count(size)[1] for size in SIZES)
    assert encode(made, module, []).shape == (0, 24)


SIZES = ((40, 3), (1, 1), (97, 2), (40, 3), (200, 1))


def test_the_statement_counts_the_multiplications() -> None:
    """What torch counts: attention of the CPU apart, and the projector's second linear, left out as small."""
    made = encoder(hidden=32, heads=2, ffn=48)
    module = made.build(24, torch.float32, torch.device("cpu"), None)
    series = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    tokens, rows = made.count(series.shape)
    with FlopCounterMode(display=False) as counter:
        encode(made, module, [series])
    part = made.work(24, 4)
    second = 2 * rows * 32 * made.config.merge * 24
    assert counter.get_total_flops() == part.forward(even_load(tokens)).flops + second
    assert part.forward(even_load(0, tokens**2)).flops == 2 * attention_flops(tokens**2, 2, 16, causal=False)
    assert part.backward(even_load(tokens), Grad.BOTH).flops == 2 * part.forward(even_load(tokens)).flops
    assert sum(weight.elements for weight in part.weights()) == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("more", [[], ["layout.llm.pp=2"], ["placement=disaggregated", "placement.ranks=1"]])
def test_the_statement_is_what_a_rehearsal_measures(tmp_path: Path, more: list[str]) -> None:
    write_uneven(tmp_path / "series")
    keys = line(tmp_path / "series", tmp_path / "run", "train.precision=bf16", *more)
    spec = prepare_run(compose_config(keys), 2)
    for rank in range(2):
        plan = plan_of_step(spec, 1, spec.arrangement.domain(rank))
        found, modelled = rehearse(spec, plan, rank).footprint, model_footprint(spec, plan, rank)
        assert modelled.traffic == found.traffic
        assert modelled.parameters == found.parameters
        assert modelled.bytes == pytest.approx(found.bytes, rel=0.02)


def encode(made: TimeSeriesEncoder, module: torch.nn.Module, series: list[np.ndarray]) -> torch.Tensor:
    arrays = [made.preprocess(one) for one in series]
    lengths = [len(one.values) for one in arrays]
    values = np.concatenate([one.values for one in arrays] or [np.zeros((0, 12), np.float32)])
    positions = np.concatenate([one.positions for one in arrays] or [np.zeros((0, 1), np.int64)])
    where = torch.from_numpy(positions)
    packed = made.pack(Sharding.whole(lengths), where, torch.float64, torch.device("cpu"))
    with torch.no_grad():
        rows: torch.Tensor = module(torch.from_numpy(values), where, packed)
    return rows


def test_descriptions_say_what_the_series_holds() -> None:
    """The strongest periods below the drift: the named one is the named channel's, and the shortest."""
    rng = np.random.default_rng(0)
    for fastest in (0, 1, 2):
        series = make_series(rng, 480, 3, fastest, period=12)
        spectrum = np.abs(np.fft.rfft(series - series.mean(0), axis=0))
        spectrum[:5] = 0  # of 480 steps: periods above 96 are drift
        strongest = spectrum.argmax(0)
        assert strongest.argmax() == fastest
        assert strongest.max() == 480 // 12
    assert describe(3, 1, 12) == "three channels, the second is fastest, period twelve"
    assert describe(1, 0, 24) == "one channel, period twenty four"


def write_uneven(path: Path) -> None:
    """Series of many lengths, one sample of two, one without any."""
    rng = np.random.default_rng(0)
    with DatasetWriter(path, ByteTokenizer(), rows_per_group=4) as writer:
        for number in range(5):
            writer.add(make_sample(rng, f"series{number}"))
        two = tuple(to_item(rng.normal(size=size).astype(np.float32)) for size in ((20, 2), (150, 3)))
        writer.add(Sample("two", f"left {PLACEHOLDER} and right {PLACEHOLDER}.", two))
        writer.add(Sample("none", "no series"))


def line(data: Path, folder: Path, *more: str) -> list[str]:
    """A small run without image encoder, this one named by its class."""
    return [
        "~experiment",
        "system=multiplexed",
        "+model/llm=tiny",
        f"+model.encoders.series={{_target_: {TARGET}, hidden: 32, heads: 2, ffn: 48}}",
        f"+data.sources.uneven.path={data}",
        *SMALL,
        "data.microbatch_tokens=160",
        "data.step_samples=7",
        "train.steps=3",
        "train.precision=fp32",
        "train.timeout_s=60",
        "optim.lr=1e-3",
        "optim.eps=1e-4",
        "tracking=jsonl",
        f"run.dir={folder}",
        *more,
    ]


def measure(rank: int, overrides: list[str], world: int) -> Measurement | None:
    spec = prepare_run(compose_config(overrides), world)
    folder = RunFolder.create(Path(spec.config.run.dir))
    return parity.measure(spec, folder, rank, torch.device("cpu"), steps=spec.config.train.steps)


def measure_installed(
    rank: int, site: Path, overrides: list[str], world: int
) -> tuple[Measurement | None, str]:
    """Measure with the package installed on this rank; also says by which policy samples were divided."""
    sys.path.append(str(site))
    try:
        return measure(rank, overrides, world), prepare_run(
            compose_config(overrides), world
        ).policies.describe()
    finally:
        sys.path.remove(str(site))


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uneven") / "uneven"
    write_uneven(folder)
    return folder


@pytest.fixture(scope="module")
def one(ranks: RankPool, uneven: Path) -> Measurement:
    """What one rank makes of the series."""
    found: Measurement = ranks.run(1, measure, line(uneven, uneven.parent / "one"), 1)[0]
    return found


def test_under_the_installed_policy_two_ranks_equal_one(
    ranks: RankPool, site: Path, tmp_path: Path, uneven: Path, one: Measurement
) -> None:
    more = line(uneven, tmp_path / "two", "balance=snake")
    two, policies = ranks.run(2, measure_installed, site, more, 2)[0]
    assert "balance=snake" in policies
    assert compare(one, two)[0].relative <= TOLERANCE
    assert compare_weights(one, two)[0].relative <= WEIGHT_TOLERANCE


def test_under_policies_of_every_kind_four_ranks_equal_one(
    ranks: RankPool, site: Path, tmp_path: Path, uneven: Path, one: Measurement
) -> None:
    more = line(uneven, tmp_path / "four", "layout=pp2", "layout.domain=2", *EVERY_KIND)
    four, policies = ranks.run(4, measure_installed, site, more, 4)[0]
    assert set(EVERY_KIND) == set(policies.split(", "))
    assert compare(one, four)[0].relative <= TOLERANCE
    assert compare_weights(one, four)[0].relative <= WEIGHT_TOLERANCE


def test_layouts_equal_one_rank(ranks: RankPool, tmp_path: Path, uneven: Path, one: Measurement) -> None:
    assert any(name.startswith("series/") for name in one.gradients)
    for more in ([], ["layout=pp2"], ["layout=pp2", "encoder_sp=all"], ["placement=disaggregated"]):
        two = ranks.run(2, measure, line(uneven, tmp_path / "two", *more), 2)[0]
        worst, drifted = compare(one, two)[0], compare_weights(one, two)[0]
        assert worst.relative <= TOLERANCE, (more, worst)
        assert drifted.relative <= WEIGHT_TOLERANCE, (more, drifted)
