"""`omni compare`: systems on the same samples, what each takes, what is refused, and the page."""

import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small import overrides

import hydra_conf
from dataloader.tokens import ItemMeta, SampleMeta, length
from omni.__main__ import main
from omni.commands._compare_page import COLOURS, page
from omni.commands.compare import evened, known_systems
from omni.compose import compose_config
from omni.config import Config, ConfigError, LLMLayoutConfig
from omni.planning.allocation import ranks_beside
from omni.planning.choice import POLICIES, open_keys, value_of, with_keys
from omni.planning.prepare import prepare_run
from omni.rehearsal.ablation import KEYS, without_each
from omni.rehearsal.compare import Cell, Figures, MixedTrace, compare, quickest
from omni.rehearsal.estimate import sent_by_ranks
from omni.rehearsal.mixtures import mixed, read_mixtures
from parallel.layout import LayoutError
from parallel.placements import DISAGGREGATED
from pipeline.causes import work_of
from pipeline.costs import simulate

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TRACE = [
    SampleMeta(
        n, "trace", 10 + 7 * (n % 5), tuple([ItemMeta("image", 64, 16, 0, (16, 16))] * (n % 3)), 100, 0
    )
    for n in range(24)
]
HOSTILE = "</p><script>alert(1)</script>"


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    """Of nine ranks for disttrain, and for encode_first, which cannot have them; of eight for the others."""
    keys = ("layout.llm.pp=2", "cluster=h100", "train.precision=bf16")
    line = overrides(Path("none"), tmp_path_factory.mktemp("compare"), *keys, samples=24)
    ranks = {"megatron": 8, "disttrain": 9, "dhp": 8, "encode_first": 9}
    return {name: compose_config([*line, f"system={name}", f"launch.ranks={n}"]) for name, n in ranks.items()}


def compared(configs: dict[str, Config]) -> dict[str, Cell]:
    return {cell.system: cell for cell in compare(configs, {"mine": MixedTrace(TRACE)}, lambda what: None)}


@pytest.fixture(scope="module")
def cells(configs: dict[str, Config]) -> dict[str, Cell]:
    return compared(configs)


def figures_of(cell: Cell) -> Figures:
    assert cell.figures is not None, cell.refused
    return cell.figures


def test_figures_are_those_of_the_plans_of_all_domains(
    cells: dict[str, Cell], configs: dict[str, Config]
) -> None:
    spec = prepare_run(configs["megatron"], 8, TRACE)
    queue = spec.planner.domain.single_queue
    domains = [plan.domain for plan in spec.planner.all_domains(1, 0)]
    steps = [simulate(domain, spec.table, queue).makespan_ns for domain in domains]
    work = [ns for domain in domains for ns in work_of(domain, spec.table)]
    found = figures_of(cells["megatron"])
    assert found.step_s == max(steps) / 1e9
    assert found.tokens_per_s == spec.planner.world.take(0).tokens / found.step_s
    assert sum(found.causes.values()) == pytest.approx(1)
    assert found.causes["even"] == pytest.approx(sum(work) / 8 / max(steps))
    assert 0 < found.idle + found.exposed < 1
    sent = [of for plan in spec.planner.all_domains(1, 0) for of in sent_by_ranks(spec, plan).values()]
    assert (found.sent_inside_bytes, found.sent_across_bytes) in {(of.inside, of.across) for of in sent}
    assert found.sent_inside_bytes > 0
    assert (found.schedule, found.fits, set(found.imbalance)) == ("one_f_one_b", True, {"llm", "image"})


def test_what_is_kept_of_text_alone_is_of_the_same_tokens_on_ranks_that_the_llm_has(
    cells: dict[str, Cell], configs: dict[str, Config]
) -> None:
    texts = [replace(meta, items=(), text_tokens=length(meta) - 1) for meta in TRACE]
    own = {name: configs[name] for name in ("megatron", "disttrain")}
    alone = {cell.system: cell for cell in compare(own, {"": MixedTrace(texts)}, lambda what: None)}
    step, text = (figures_of(of["megatron"]).step_s for of in (cells, alone))
    assert figures_of(cells["megatron"]).of_text == pytest.approx(text / step)
    assert text < step
    assert figures_of(alone["megatron"]).of_text == pytest.approx(1)
    (beside,) = re.findall(r"placement.ranks=(\d+)", figures_of(alone["disttrain"]).sets)
    assert figures_of(alone["disttrain"]).of_text == pytest.approx((9 - int(beside)) / 9)


def test_ranks_beside_are_allocated_and_what_cannot_be_is_refused(cells: dict[str, Cell]) -> None:
    (beside,) = re.findall(r"placement.ranks=(\d+)", figures_of(cells["disttrain"]).sets)
    assert int(beside) % 2 == 1, "replicas of two ranks are left of nine"
    assert "does not divide the 9 ranks" in cells["encode_first"].refused
    assert [cell.system for cell in quickest(list(cells.values()))][-1] == "encode_first"


def test_what_does_not_fit_a_device_says_so_and_comes_later(
    cells: dict[str, Cell], configs: dict[str, Config]
) -> None:
    small = compared({"megatron": with_keys(configs["megatron"], {"cluster.memory_bytes": 1})})["megatron"]
    assert not figures_of(small).fits
    slow = replace(cells["dhp"], figures=replace(figures_of(cells["dhp"]), step_s=1e9))
    assert [cell.system for cell in quickest([small, cells["encode_first"], slow])] == [
        *("dhp", "megatron", "encode_first")
    ]


def test_whoever_cannot_share_a_long_sample_has_passes_that_hold_it(configs: dict[str, Config]) -> None:
    long = {name: with_keys(configs[name], {"data.sample_tokens": 320}) for name in ("megatron", "dhp")}
    found = compared(long)
    assert "data.microbatch_tokens=320" in figures_of(found["megatron"]).sets
    assert "microbatch_tokens" not in figures_of(found["dhp"]).sets


def test_systems_that_train_on_other_samples_are_not_compared(configs: dict[str, Config]) -> None:
    fewer = with_keys(configs["dhp"], {"data.step_samples": 12})
    with pytest.raises(AssertionError, match="dhp trains on other samples"):
        compared({"megatron": configs["megatron"], "dhp": fewer})


@pytest.mark.parametrize("world, work", [(64, (100, 5)), (64, (100, 100)), (64, (100, 700)), (19, (3, 9))])
def test_as_many_ranks_encode_as_keep_the_llm_busy(world: int, work: tuple[int, int]) -> None:
    """No other division into replicas of four ranks and copies of two takes less."""
    sizes = LLMLayoutConfig(tp=2, pp=2)
    chosen = ranks_beside(world, sizes, {"image": 1}, DISAGGREGATED, work=work)
    replicas = (world - chosen) // 4

    def step(replicas: int) -> float:
        return max(work[0] / replicas, work[1] * 4 / (world - 4 * replicas))

    assert step(replicas) == min(step(r) for r in range(1, (world - 1) // 4 + 1))


@pytest.mark.parametrize(
    "world, encoder_tp, sizes, nearest",
    [
        (4, 2, {}, 6),
        (1, 1, {}, 5),
        (9, 2, {}, 8),
        (9, 4, {"dp": 1}, 8),
        (9, 6, {}, 10),
        (100, 1, {"dp": 30}, 121),
    ],
)
def test_ranks_that_leave_none_to_encode_are_refused_with_the_nearest_that_would_do(
    world: int, encoder_tp: int, sizes: dict[str, int], nearest: int
) -> None:
    own = LLMLayoutConfig(tp=2, pp=2, **sizes)
    with pytest.raises(LayoutError, match=f"launch.ranks={world}: .*launch.ranks={nearest} would do"):
        ranks_beside(world, own, {"image": encoder_tp}, DISAGGREGATED)
    assert ranks_beside(nearest, own, {"image": encoder_tp}, DISAGGREGATED) % encoder_tp == 0


@pytest.mark.parametrize("weights", [(1, 9), (5, 5), (9, 1), (1, 0), (0, 1), (2, 1)])
def test_a_mixture_has_its_share_everywhere(weights: tuple[int, int]) -> None:
    trace = mixed(TRACE * 5, weights)
    assert len(trace) == 120
    has = np.cumsum([bool(meta.items) for meta in trace])
    even = np.arange(1, 121) * weights[0] / sum(weights)
    assert np.abs(has - even).max() < 1


@pytest.mark.parametrize("text", ["", "1", "1:", "0:0", "a:b", "-1:2", "1:2:3", "1:9,", "1:2-3:4-5:6"])
def test_what_is_no_mixture_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--mixtures .* 1:9"):
        read_mixtures(text)


def test_after_a_jump_a_run_has_what_it_chose_before(configs: dict[str, Config]) -> None:
    texts, pictures = mixed(TRACE * 2, (1, 9)), mixed(TRACE * 2, (1, 0))
    every = {"1:9": MixedTrace(texts), "1:0": MixedTrace(pictures), "1:9-1:0": MixedTrace(pictures, texts)}
    assert list(read_mixtures(",".join(every)).values()) == [((1, 9),), ((1, 0),), ((1, 9), (1, 0))]
    own = {"disttrain": with_keys(configs["disttrain"], {"data.step_samples": 48})}
    own["disttrain"].launch.ranks = 33
    first, then, jumped = compare(own, every, lambda what: None)
    assert figures_of(jumped).sets == figures_of(first).sets != figures_of(then).sets
    assert jumped.samples == then.samples != first.samples
    assert figures_of(jumped).step_s > figures_of(then).step_s


def test_presets_are_evened_as_ours_unless_they_are(configs: dict[str, Config]) -> None:
    every = configs | {name: compose_config([f"system={name}"]) for name in ("omni", "multiplexed")}
    found = evened(every)
    assert set(found) == {f"{name}, even" for name in configs}
    of = found["megatron, even"].policies
    assert (of["balance"], of["deal"], of["placement"]) == ("two_constraint", "by_cost", "stage0")


def test_an_ablation_lacks_one_thing_and_chooses_all_else() -> None:
    own = compose_config(["system=omni", "layout=pp2"])
    apart = dict(without_each(own))
    assert list(apart) == list(KEYS)
    for name, keys in KEYS.items():
        assert with_keys(apart[name], {key: value_of(own, key) for key in keys}) == own
        assert all(value_of(apart[name], key) == value != value_of(own, key) for key, value in keys.items())
        assert set(open_keys(own)) - set(open_keys(apart[name])) == set(keys) & set(POLICIES)


@pytest.mark.parametrize("layout, left_out", [("pp=1", 2), ("pp=2", 0), ("vpp=2", 1)])
def test_nothing_is_ablated_that_a_layout_does_not_have(layout: str, left_out: int) -> None:
    own = compose_config(["system=omni", "layout.llm.pp=2", f"layout.llm.{layout}"])
    assert len(KEYS) - len(dict(without_each(own))) == left_out


def test_a_trace_without_items_cannot_be_mixed_with_some() -> None:
    with pytest.raises(ConfigError, match="no sample of the trace is with items"):
        mixed([meta for meta in TRACE if not meta.items], (1, 1))


LINE = ("cluster=h100", "layout=pp2", "data.step_tokens=4096", "data.on_long=truncate")


def run_compare(*words: str) -> int:
    return main(["compare", "--trace", "longtail", *words, *LINE])


def test_the_command_prints_a_row_for_each_system_and_mixture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.html"
    asked = ("--systems", "megatron,mimo_disaggregated,multiplexed", "--mixtures", "1:1,0:1")
    assert run_compare(*asked, "--html", str(file), "launch.ranks=2") == 0
    out = capsys.readouterr().out
    assert [row.split()[0] for row in out.splitlines() if row.startswith(("1:1", "0:1"))] == ["1:1:", "0:1:"]
    assert len(re.findall(r"^(?:megatron|multiplexed) +[\d,.]+ ", out, re.MULTILINE)) == 4
    assert len(re.findall(r"^mimo_disaggregated +refused: launch.ranks=2", out, re.MULTILINE)) == 2
    assert out.count(" 1.00 ") >= 2
    assert file.read_text().count("<svg") == 2


def test_json_has_figures_or_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_compare("--systems", "megatron,disttrain", "--json", "launch.ranks=2") == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["simulated"]["step_s"] > 0
    assert set(second) == {"mixture", "system", "refused"}


@pytest.mark.parametrize(
    "words, said",
    [
        (["--systems", "megatrom"], "nearest is megatron"),
        (["system=omni"], "--systems says which"),
        (["--mixtures", "1"], "such as 1:9"),
        (["--systems", "disttrain", "launch.ranks=2"], "every system is refused"),
        (["--systems", "megatron", "nope=1"], "nope"),
        (["--systems", "megatron", "--ablate"], "from omni: name it"),
        (["--measure", "2"], "--trace is of simulated steps"),
    ],
)
def test_mistakes_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_compare(*words) == 2
    assert said in capsys.readouterr().err


def test_mixtures_need_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--systems", "megatron", "--mixtures", "1:9"]) == 2
    assert "--trace longtail" in capsys.readouterr().err


def test_all_systems_are_compared_unless_some_are_named() -> None:
    own = {path.stem for path in (Path(hydra_conf.__file__).parent / "system").glob("*.yaml")}
    assert known_systems()[0] == "omni"
    assert set(known_systems()) == own


def test_the_page_runs_nothing_whatever_names_say(cells: dict[str, Cell]) -> None:
    named = [replace(cell, mixture=HOSTILE, system=HOSTILE, refused=HOSTILE) for cell in cells.values()]
    text = page(named, HOSTILE)
    assert "<script" not in text
    assert text.count("&lt;script&gt;") > 4
    assert "default-src 'none'" in text
    assert not re.findall(r'(?:src|href)="', text)


@pytest.mark.slow  # it starts a browser
def test_a_browser_draws_the_page(cells: dict[str, Cell], tmp_path: Path) -> None:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser among {', '.join(BROWSERS)}")
    file, shot = tmp_path / "page.html", tmp_path / "shot.png"
    file.write_text(page(list(cells.values()), "launch.ranks=8"))
    words = ["--headless", "--disable-gpu", "--no-sandbox", f"--screenshot={shot}", "--window-size=1200,900"]
    subprocess.run([browser, *words, file.as_uri()], check=True, timeout=120, capture_output=True)
    pixels = np.asarray(Image.open(io.BytesIO(shot.read_bytes())).convert("RGB")).reshape(-1, 3)
    for name in ("even", "work", "bubble"):
        colour = tuple(bytes.fromhex(COLOURS[name][1:]))
        assert (pixels == colour).all(1).sum() > 100, name
