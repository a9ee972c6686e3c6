"""What is chosen for a run that leaves keys open: never what was given, about the best, the same anywhere."""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest

from dataloader.tokens import ItemMeta, SampleMeta
from infra.run_folder import RunFolder
from omni.commands import _jobs
from omni.compose import compose_config
from omni.compose_saved import compose_saved
from omni.config import ConfigError
from omni.planning.choice import (
    BALANCE,
    CONTEXT,
    DOMAIN,
    ENCODER_SP,
    LLM_SP,
    LONGEST,
    PACKING,
    PACKS,
    POLICIES,
    RECOMPUTE,
    VPP,
    Tried,
    as_saved,
    open_keys,
    recomputed,
    reopened,
    text_of,
    value_of,
    with_keys,
)
from omni.planning.choice import MICROBATCH as PASS
from omni.planning.choose import _attending_once, _changed, _smaller_domains
from omni.planning.cut import cut_of
from omni.planning.fullest import fullest_rank
from omni.planning.host_memory import most_on_host
from omni.planning.planner import Planner
from omni.planning.policy_search import SearchSpace, _of_best_size, _packed, search_policies
from omni.planning.prepare import prepare_run
from omni.planning.room import mean_context
from omni.planning.trials import DOMAINS, GAIN, STEPS, gains, on_whole_steps, once_each, tried_out
from omni.training.choice_watch import COSTS
from omni.training.seats import fitting
from parallel.layout import CONTEXT as ANY_CONTEXT
from pipeline.costs import simulate

MICROBATCH = 64
KEYS = [
    "system=omni", "data.sample_tokens=null", f"data.microbatch_tokens={MICROBATCH}", "data.step_tokens=null",
    "data.step_samples=24", "train.steps=10",
]  # fmt: skip


def trace_of(*long: int, seed: int = 0) -> list[SampleMeta]:
    short = [
        SampleMeta(
            n,
            "trace",
            9 + 7 * ((n + seed) % 6),
            (ItemMeta("image", 16 * (1 + n % 3), 4, 3, ()),) * (n % 2),
            9,
        )
        for n in range(24 - len(long))
    ]
    return [*short, *(SampleMeta(len(short) + n, "trace", size - 1, (), 9) for n, size in enumerate(long))]


def prepared(*more, ranks=4, trace=None):
    return prepare_run(compose_config([*KEYS, *more]), ranks, trace or trace_of(150))


def step_ns(spec):
    plans = spec.planner.all_domains(1, 0)
    return max(
        simulate(plan.domain, spec.table, spec.planner.domain.single_queue).makespan_ns for plan in plans
    )


@pytest.mark.parametrize(
    "ranks, more, long",
    [
        (4, [], (60, 64)),
        (4, ["layout=pp2"], (150,)),
        (8, ["layout=tp2"], ()),
        (3, [], (150,)),
    ],
)
def test_no_combination_of_candidates_is_much_better(ranks, more, long):
    trace = trace_of(*long)
    spec = prepared(*more, "pipeline=encode_first", ranks=ranks, trace=trace)
    assert spec.choice is not None
    assert not open_keys(spec.config)
    least = None
    dp = spec.arrangement.llm.dp
    for size, *names in product([n for n in range(1, dp + 1) if dp % n == 0], *POLICIES.values()):
        if size * MICROBATCH < min(spec.config.data.sample_tokens, max(long, default=0)):
            continue  # ranks would hold more than a microbatch
        own = {DOMAIN: size, **dict(zip(POLICIES, names, strict=True))}
        own[LONGEST] = spec.config.data.sample_tokens
        try:
            other = prepare_run(with_keys(spec.config, own), ranks, trace)
        except ConfigError:
            continue  # a long sample that nobody shares
        least = min(least or step_ns(other), step_ns(other))
    assert least is not None
    assert step_ns(spec) <= 1.08 * least


@pytest.mark.parametrize(
    "given",
    [
        {"layout.domain": 2},
        {"llm_sp.policy": "dhp"},
        {"encoder_sp.policy": "none"},
        {"balance.policy": "lpt", "pairing.policy": "in_order"},
        {"layout.domain": 1, "llm_sp.policy": "uniform"},
        {"data.sample_tokens": 100},
        {"data.microbatch_tokens": 96, "model.llm.recompute": "full"},
    ],
)
def test_a_key_that_was_given_stays(given):
    spec = prepared(*(f"{key}={value}" for key, value in given.items()))
    assert {key: value_of(spec.config, key) for key in given} == given
    assert not set(given) & set(spec.config.choice.keys)


@pytest.fixture
def small_passes(monkeypatch):
    """Where nobody says what a pass holds, 64 tokens."""
    for module in ("choice", "choose", "policy_search", "room"):
        monkeypatch.setattr(f"omni.planning.{module}.PASS_TOKENS", MICROBATCH)
    monkeypatch.setattr("omni.planning.room.ROUND", 2)


@pytest.mark.usefixtures("small_passes")
def test_what_a_pass_holds_is_enough_for_the_longest_sample_where_nobody_says():
    open_ = "data.microbatch_tokens=null"
    four = prepared(open_)
    domain, budget = four.config.layout.domain, four.config.data.microbatch_tokens
    assert budget == max(MICROBATCH, -(-four.config.data.sample_tokens // domain // 2) * 2)
    assert four.config.data.sample_tokens >= 150
    assert cut_of(four.planner, four.planner.world.take(0)).samples == 0
    first = next(iter(four.choice.lines()))
    assert f"data.microbatch_tokens={budget}" in first
    again = prepared(*first.removeprefix("chosen: ").split())
    assert again.choice is None
    assert next(again.planner.all_domains(1, 0)).digests == next(four.planner.all_domains(1, 0)).digests
    one = prepare_run(four.config, 1, trace_of(150))
    assert one.config.data.microbatch_tokens >= 150, "whose pass holds the longest by itself"
    assert as_saved(compose_config([*KEYS, open_]), four.config).data.microbatch_tokens == budget
    alone = prepared(open_, "llm_sp=uniform", "layout.domain=1")
    assert alone.config.data.microbatch_tokens >= 150, "nobody shares"
    unshared = compose_config([*KEYS[1:], "system=multiplexed", open_])
    assert prepare_run(unshared, 4, trace_of(150)).config.data.microbatch_tokens >= 150


def test_the_llm_recomputes_what_fits_and_takes_least():
    def held(recompute, *more):
        made = prepared(f"model.llm.recompute={recompute}", "layout.domain=1", *more, trace=trace_of())
        return fullest_rank(made, made.planner.all_domains(1, 0)).bytes

    usual, least = held("selective"), held("full")
    assert least < usual

    auto = ("model.llm.recompute=auto", "layout.domain=1", "packing.divisor=1")
    lean = prepared(*auto, f"cluster.memory_bytes={(least + usual) // 2}", trace=trace_of())
    assert lean.config.model.llm.recompute == "full"
    assert not lean.choice.best.refused
    assert "model.llm.recompute=full" in next(iter(lean.choice.lines()))
    long = [SampleMeta(n, "trace", 4000, (), 9) for n in range(24)]
    ample = prepared(*auto, "data.microbatch_tokens=4096", trace=long).config
    assert ample.model.llm.recompute == "none"
    assert reopened(ample, 2).model.llm.recompute == "auto"
    assert "selective" not in recomputed(replace(ample.model.llm, window=16))


def test_passes_of_long_samples_alone_are_computed_anew_where_others_have_room(monkeypatch):
    """Each replica has a sample as long as 32 others, which are packed by less."""
    lengths = [4095] * 4 + [127] * 384
    trace = [SampleMeta(n, "trace", length, (), 9) for n, length in enumerate(lengths)]
    keys = ("layout.domain=1", "llm_sp=uniform", "data.microbatch_tokens=4096")
    keys += ("data.step_tokens=null", f"data.step_samples={len(lengths)}")

    def made(*more):
        return prepared(*keys, *more, trace=trace)

    def held(spec):
        return fullest_rank(spec, spec.planner.all_domains(1, 0)).bytes

    full = made("model.llm.recompute=full", "packing.divisor=1")
    tight = ("model.llm.recompute=auto", f"cluster.memory_bytes={held(full) * 11 // 10}")
    assert made(*tight, "packing.divisor=1").config.model.llm.recompute == "full"
    wholes = []

    def counted(config, keys, *args, steps=STEPS, **more):
        wholes.extend([text_of(keys)] * (steps == 1))
        return tried_out(config, keys, *args, steps=steps, **more)

    monkeypatch.setattr("omni.planning.choose.tried_out", counted)
    chosen = made(*tight)
    assert len(wholes) == len(set(wholes)) > 3
    assert not chosen.choice.best.refused
    assert chosen.config.model.llm.recompute != "full"
    assert chosen.config.model.llm.recompute_long
    assert chosen.config.model.llm.keep_attention
    assert chosen.config.packing.divisor > 1
    batches = chosen.planner.next_step(1, 0, 0).domain.microbatches
    assert {batch.layout.lengths[0]: batch.anew for batch in batches} == {4096: True, 128: False}
    assert held(chosen) <= chosen.cluster.memory_bytes
    again = reopened(chosen.config, 2).model.llm
    assert (again.recompute, again.recompute_long, again.keep_attention) == ("auto", False, False)


def test_inputs_of_encoders_layers_go_to_the_host_where_that_saves_rounds():
    """An encoder of wide layers, each of which keeps its input alone; what hosts have is known, or not."""
    wide = ("hidden=256", "heads=4", "ffn=64", "layers=12", "recompute=full")
    keys = ("layout.llm.pp=4", "packing.divisor=1", "pipeline=encode_first", "data.step_samples=12")
    keys += ("cluster.op_overhead_ns=10000000",)  # rounds, which pass through four stages each, take longer
    keys += tuple(f"model.encoders.image.{key}" for key in wide)
    host = ("cluster.host_memory_bytes=1000000000",)
    trace = [SampleMeta(n, "trace", 40, (ItemMeta("image", 1024, 16, 3, ()),), 9) for n in range(12)]
    offload = "model.encoders.image.offload"

    def made(*more):
        return prepared(*keys, *more, trace=trace)

    def held(*more):
        spec = made("model.llm.recompute=full", f"++{offload}=10", "pipeline.rounds=1", *more)
        return fullest_rank(spec, spec.planner.all_domains(1, 0)).bytes

    auto = ("model.llm.recompute=auto", f"cluster.memory_bytes={held() * 101 // 100}")
    chosen = made(*auto, *host)
    assert not chosen.choice.best.refused
    assert value_of(chosen.config, offload) == 10, "the last layer's input would come back behind nothing"
    plan = chosen.planner.next_step(1, 0, 0)
    assert plan.domain.rounds == 1
    assert most_on_host(chosen, chosen.table, plan) > 0
    assert f"++{offload}=10" in next(iter(chosen.choice.lines()))
    again = made(*next(iter(chosen.choice.lines())).removeprefix("chosen: ").split(), auto[1], *host)
    assert again.planner.next_step(1, 0, 0).digests == plan.digests
    assert value_of(reopened(chosen.config, 8), offload) is None

    for more in ((), (*host, f"++{offload}=0"), (*host, "cluster.host_link_bytes_per_s=null")):
        stays = made(*auto, *more)
        assert not value_of(stays.config, offload)
        assert stays.planner.next_step(1, 0, 0).domain.rounds > 1
    little = made(*auto, f"cluster.host_memory_bytes={most_on_host(chosen, chosen.table, plan) - 1}")
    assert little.planner.next_step(1, 0, 0).domain.rounds > 1, "what is on the host has to have room there"
    ample = made("model.llm.recompute=auto", "cluster.memory_bytes=100000000000", *host)
    assert value_of(ample.config, offload) == 0
    half = f"cluster.host_memory_bytes={most_on_host(chosen, chosen.table, plan) // 2}"
    forced = made("model.llm.recompute=full", f"++{offload}=10", "cluster.memory_bytes=100000000000", half)
    halves = forced.planner.next_step(1, 0, 0)
    assert halves.domain.rounds > 1, "what devices keep would leave no room to be made up for"
    assert forced.planner.beyond(halves) <= 0


def test_what_attention_of_an_encoder_puts_out_is_kept_where_that_fits_and_gains():
    """Pictures of 4,096 tokens, in narrow layers: attention is nearly all that they do."""
    keep = "model.encoders.image.keep_attention"
    own = ("hidden=64", "heads=4", "ffn=64", "layers=6", "recompute=full", "max_tokens=4096")
    keys = [f"++model.encoders.image.{key}" for key in own] + ["train.precision=bf16", "data.step_samples=12"]
    trace = [SampleMeta(n, "trace", 40, (ItemMeta("image", 4096, 16, 3, ()),), 9) for n in range(12)]

    def made(*more):
        return prepared(*keys, *more, trace=trace)

    known = "cluster.memory_bytes=100000000000"
    chosen = made(known)
    assert value_of(chosen.config, keep) is True
    assert f"++{keep}=True" in next(iter(chosen.choice.lines()))
    assert value_of(made().config, keep) is None, "nobody knows what fits"
    gpus = ("train.precision=fp32", "cluster.device=cuda")
    assert value_of(made(known, *gpus).config, keep) is None
    with pytest.raises(
        ConfigError, match=r"image\.keep_attention=True: with train\.precision=fp32 GPUs have"
    ):
        made(known, *gpus, f"++{keep}=true")
    assert value_of(made(known, f"++{keep}=false").config, keep) is False
    other, _ = compose_saved(chosen.config, ["model.encoders.image.recompute=none"])
    assert value_of(other, keep) is None, "it would say something of layers that keep all"
    assert value_of(compose_saved(chosen.config, [])[0], keep) is True
    gone, _ = compose_saved(chosen.config, ["~model.encoders.image"])
    assert keep not in gone.choice.keys


@pytest.mark.parametrize(
    "held, step_ns, kept", [(40, 999, True), (40, 1000, False), (60, 991, False), (60, 989, True)]
)
def test_attention_is_kept_on_any_gain_where_devices_are_half_empty(held, step_ns, kept):
    """Devices have 100 bytes; without it a step takes 1,000 ns."""

    def whole_step(own, beside=None, lean=False):
        return Tried(own, step_ns if own["keep"] else 1000, beyond=held - 100)

    best, others = _attending_once(Tried({"keep": False}, 1000), ["keep"], {}, whole_step, 100)
    assert best.keys["keep"] is kept
    assert len(others) == 1


@pytest.mark.parametrize("now, other, goes", [(1000, 1000, False), (1000, 1004, False), (1000, 1006, True)])
def test_what_is_on_the_host_stays_on_the_device_unless_that_takes_longer(now, other, goes):
    steps = {10: now, 0: other}

    def whole_step(own, beside=None, lean=False):
        assert beside is None or beside.step_ns == 1005, "it may take half a hundredth longer"
        assert lean == (own["sent"] == 0), (
            "where a lean schedule alone fits, so it does with more on the device"
        )
        return Tried(own, steps[own["sent"]], lean=True)

    best, tried = _changed(Tried({"sent": 10}, 10 * now), {"sent": 0}, whole_step, -GAIN)
    assert best.keys["sent"] == (10 if goes else 0)
    assert tried.step_ns == 10 * other


def test_weights_are_divided_where_nothing_else_fits():
    """Of wide layers with short samples, which hold little beside weights, gradients and moments."""
    wide = ("model.llm.hidden=256", "model.llm.ffn=2048", "data.sample_tokens=64", "pipeline=one_f_one_b")

    def held(*more):
        made = prepared(*wide, *more, trace=trace_of())
        return fullest_rank(made, made.planner.all_domains(1, 0)).bytes

    whole, divided = held("layout.llm.zero=1"), held("layout.llm.zero=3", "layout.domain=4")
    assert divided < 0.8 * whole
    tight = (*wide, f"cluster.memory_bytes={(2 * divided + whole) // 3}")
    spec = prepared(*tight, trace=trace_of())
    assert spec.config.layout.llm.zero == spec.arrangement.llm.zero == 3
    assert spec.arrangement.pool > 1
    assert not spec.choice.best.refused
    assert max(map(spec.planner.beyond, spec.planner.all_domains(1, 0))) <= 0
    assert "layout.llm.zero=3" in next(iter(spec.choice.lines()))
    assert reopened(spec.config, 8).layout.llm.zero is None
    assert prepared(*tight, "layout.llm.zero=1", trace=trace_of()).choice.best.refused
    assert prepared(*wide, trace=trace_of()).config.layout.llm.zero == 1, "where there is room, nothing is"
    assert prepared(*tight, ranks=1, trace=trace_of()).config.layout.llm.zero == 1, "one rank divides nothing"


def test_what_holds_least_is_tried_in_domains_of_any_size(monkeypatch):
    monkeypatch.setattr(
        "omni.planning.prepare.beyond", lambda *of, closely=True: 10**6 // of[2].domain.num_ranks
    )
    keys = (
        "model.llm.recompute=auto",
        "data.sample_tokens=64",
        "packing.divisor=1",
        "cluster.memory_bytes=1",
    )
    tried = prepared(*keys, ranks=8, trace=trace_of()).choice.tried
    sizes = {
        name: {each.keys[DOMAIN] for each in tried if each.keys[RECOMPUTE] == name}
        for name in ("selective", "full")
    }
    assert sizes["full"] == sizes["selective"] == {1, 2, 4, 8}, "where none fits, large domains look best"


def test_a_packing_that_keeps_the_order_of_packs_has_a_pairing_that_does():
    assert prepared("packing=entrain").config.pairing.policy == "in_order"
    with pytest.raises(ConfigError, match=r"packing\.policy=entrain .* pairing=in_order"):
        prepared("packing=entrain", "pairing=alike")


def test_the_printed_keys_give_the_same_run_without_choosing():
    spec = prepared()
    first = next(iter(spec.choice.lines()))
    again = prepared(*first.removeprefix("chosen: ").split())
    assert again.choice is None
    assert [plan.digests for plan in again.planner.all_domains(1, 0)] == [
        plan.digests for plan in spec.planner.all_domains(1, 0)
    ]


def test_the_same_inputs_give_the_same_choice_and_none_hangs_on_a_clock(monkeypatch):
    first = prepared()

    def never():
        raise AssertionError("asked for the time")

    for name in ("time", "monotonic", "perf_counter", "process_time"):
        monkeypatch.setattr(f"time.{name}", never)
    assert prepared().choice == first.choice


def test_long_samples_stay_whole_where_ranks_hold_them_together():
    spec = prepared()
    assert spec.arrangement.pool * MICROBATCH >= 150
    assert spec.config.data.sample_tokens >= 150
    assert cut_of(spec.planner, spec.planner.world.take(0)).samples == 0


def test_what_no_ranks_hold_is_cut_and_said_with_what_would_hold_it():
    spec = prepared(ranks=2, trace=trace_of(150, 400))
    assert spec.config.data.sample_tokens == 2 * MICROBATCH
    said = spec.choice.cut
    for part in ("2 of the first 24", "128 tokens", "longest has 400", "data.microbatch_tokens=200"):
        assert part in said
    whole = prepared("data.microbatch_tokens=200", ranks=2, trace=trace_of(150, 400))
    assert whole.choice.cut == ""
    assert cut_of(whole.planner, whole.planner.world.take(0)).samples == 0


def test_samples_that_no_ranks_hold_are_refused_where_they_are_an_error():
    with pytest.raises(ConfigError, match=r"data\.on_long=error: 1 of the first 24 .* 150.* truncate"):
        prepared("data.on_long=error", ranks=1)


def test_a_sample_is_no_longer_than_a_step():
    spec = prepared("data.step_samples=null", "data.step_tokens=100")
    assert spec.config.data.sample_tokens == 100
    assert "data.step_tokens=150" in spec.choice.cut


def test_keys_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match=r"data\.sample_tokens=300.*llm_sp=uniform"):
        prepared("data.sample_tokens=300", "llm_sp=uniform")
    with pytest.raises(ConfigError, match=r"data\.sample_tokens=300.*raise layout\.domain"):
        prepared("data.sample_tokens=300", "layout.domain=1")


def test_other_ranks_choose_again_and_train_on_the_same_samples():
    four = prepared().config
    assert four.choice.ranks == 4
    two = prepare_run(four, 2, trace_of(150))
    assert two.choice.again == 4
    assert "again (before: for 4 ranks)" in next(iter(two.choice.lines()))
    assert two.config.layout.domain <= 2
    assert two.config.data.sample_tokens == four.data.sample_tokens
    assert prepare_run(four, 4, trace_of(150)).choice is None
    assert fitting(with_keys(four, {DOMAIN: 4}), 3)[1] == 3, "a domain that was chosen hinders no layout"


def test_a_run_that_goes_on_keeps_its_choices_and_an_old_one_what_it_has():
    fresh = compose_config(KEYS)
    saved = prepared().config
    kept = as_saved(fresh, saved)
    assert replace(kept, run=saved.run) == saved
    given = as_saved(compose_config([*KEYS, "balance=lpt"]), saved)
    assert given.balance.policy == "lpt"
    assert "balance.policy" not in given.choice.keys
    old = compose_config([*KEYS[1:], "system=multiplexed", "layout.domain=2"])
    assert as_saved(fresh, old).layout.domain == 2
    assert as_saved(fresh, old).data.sample_tokens is None
    assert not open_keys(as_saved(fresh, old))


def test_who_names_no_policy_has_them_chosen():
    config = compose_config([])
    assert {key: value_of(config, key) for key in POLICIES} == dict.fromkeys(POLICIES, "auto")
    assert config.pipeline.policy == "auto"
    assert {DOMAIN, PACKS} < set(open_keys(config))
    assert not open_keys(compose_config(["system=multiplexed"]))


def test_a_run_of_before_the_default_keeps_its_schedule_unless_one_is_named():
    old = compose_config([*KEYS[1:], "system=multiplexed"])
    assert replace(as_saved(compose_config(KEYS), old), run=old.run) == old
    named = as_saved(compose_config([*KEYS, "pipeline=auto"]), old, {"pipeline.policy"})
    assert named.pipeline.policy == "auto"
    joint = as_saved(compose_config([*KEYS, "pipeline=joint"]), old, {"pipeline.policy"})
    assert joint.pipeline.policy == "joint"


def test_a_key_that_is_given_as_a_run_goes_on_is_chosen_no_more():
    saved = prepared().config
    config, _ = compose_saved(saved, ["layout.domain=1", "balance=lpt"])
    assert config.choice.keys == [key for key in saved.choice.keys if key not in (DOMAIN, "balance.policy")]
    assert not open_keys(config)
    plain, _ = compose_saved(saved, ["system=multiplexed"])
    changed = {key for key, (simpler, _) in POLICIES.items() if value_of(saved, key) != simpler}
    assert changed
    assert set(plain.choice.keys) == set(saved.choice.keys) - changed
    assert not open_keys(plain)


def test_a_run_that_goes_on_chooses_anew_where_it_is_told_to():
    saved = prepared().config
    config, _ = compose_saved(saved, ["system=omni"])
    assert set(open_keys(config)) == set(saved.choice.keys) - {LONGEST}
    again = prepare_run(config, 4, trace_of(150))
    assert again.choice is not None
    assert again.config == saved


@pytest.mark.parametrize("given", [["layout=pp2"], ["layout.llm.pp=2"], ["placement=stage0"]])
def test_a_run_that_goes_on_in_another_layout_chooses_again(given):
    saved = prepared().config
    assert saved.layout.domain == 4, "which no two stages of four ranks have"
    opened = set(saved.choice.keys) - {LONGEST}
    config, _ = compose_saved(saved, given)
    assert set(open_keys(config)) == opened
    assert set(open_keys(as_saved(compose_config([*KEYS, *given]), saved))) == opened
    assert prepare_run(config, 4, trace_of(150)).choice is not None
    same, _ = compose_saved(saved, ["layout=data_parallel"])
    assert same == saved
    own, _ = compose_saved(saved, [*given, "layout.domain=2", "balance=lpt"])
    assert set(open_keys(own)) == opened - {DOMAIN, "balance.policy"}


def test_a_run_that_is_told_to_chooses_again_by_its_next_steps(tmp_path, monkeypatch):
    even = [SampleMeta(n, "trace", 40, (), 9) for n in range(96)]  # four steps
    large = ItemMeta("image", 4096, 16, 3, ())
    trace = [*even, *(replace(of, id=96 + of.id, items=(large,) * (of.id % 24 == 0)) for of in even)]
    spec = prepared("data.sample_tokens=64", "health.choose_again=true", trace=trace)
    assert spec.config.layout.domain == 1
    monkeypatch.setattr("omni.planning.prepare.prepare_run", partial(prepare_run, trace=trace))
    folder = RunFolder(tmp_path)

    def goes_on(config, costs):
        folder.metrics.write_text(f'{{"progress/step": 1, "{COSTS}": {costs}}}\n')
        return _jobs._chosen_again(replace(spec, config=config, choice=None), folder, 4, 96)

    again = goes_on(spec.config, 0.2)
    assert again.config.layout.domain > 1
    assert again.config.choice.since == 4
    assert again.choice.again == 4
    alone = prepared("data.sample_tokens=64", trace=trace[96:])
    assert again.choice.best == alone.choice.best
    assert goes_on(spec.config, 0.1).choice is None
    silent = with_keys(spec.config, {"health.choose_again": False})
    assert goes_on(silent, 0.2).config == silent


def test_a_layout_of_ones_own_may_say_how_large_domains_are(tmp_path):
    (tmp_path / "layout").mkdir()
    (tmp_path / "layout" / "mine.yaml").write_text("llm: {pp: 2, dp: null}\ndomain: 2\n")
    config = compose_config([*KEYS[1:], "layout=mine"], str(tmp_path))
    assert config.layout.domain == 2
    assert DOMAIN not in open_keys(config)
    resumed, _ = compose_saved(prepared().config, ["layout=mine"], str(tmp_path))
    assert resumed.layout.domain == 2
    assert DOMAIN not in open_keys(resumed)


def test_the_domains_that_are_simulated_have_the_slowest_among_them():
    spec = prepared("layout.domain=1", "balance=none", "llm_sp=uniform", "data.sample_tokens=64", ranks=8)
    assert isinstance(spec.planner, Planner)
    found = [plan.number for plan, _ in spec.planner.busiest(1, 0)]
    assert sorted(found) == list(range(8))
    times = {
        plan.number: simulate(plan.domain, spec.table, False).makespan_ns
        for plan in spec.planner.all_domains(1, 0)
    }
    assert max(times, key=times.__getitem__) in found[:DOMAINS]
    assert times[found[0]] > times[found[-1]]


def test_samples_are_cut_to_a_microbatch_where_devices_hold_no_longer_ones(monkeypatch):
    def beyond(spec, table, plan, closely=True):
        return max(plan.taken.lengths) - MICROBATCH

    monkeypatch.setattr("omni.planning.prepare.beyond", beyond)
    spec = prepared()
    assert spec.config.data.sample_tokens == MICROBATCH
    assert not spec.choice.best.refused
    assert "1 of the first 24" in spec.choice.cut
    assert prepared("data.sample_tokens=150").choice.best.refused.startswith("does not fit")


@pytest.mark.parametrize("cp", [1, 2])
def test_a_rank_holds_no_more_of_a_pass_where_sequences_are_shared(cp):
    spec = prepared(f"layout.llm.cp={cp}", "llm_sp=dynamic", "layout.domain=2", "data.sample_tokens=64")
    plan = next(spec.planner.all_domains(1, 0))
    pool = spec.arrangement.pool
    most = [max(map(batch.layout.local_tokens, range(pool))) for batch in plan.domain.microbatches]
    assert max(most) <= MICROBATCH // cp


def test_packs_are_smaller_where_that_fills_a_pipeline():
    keys = ["layout=pp2", "data.microbatch_tokens=640", "pipeline=encode_first", "data.sample_tokens=640"]
    keys += ["cluster.op_overhead_ns=0", "cluster.launch_ns=0"]
    spec = prepared(*keys, trace=trace_of())
    assert spec.config.packing.divisor > 1
    assert "packing.divisor" in next(iter(spec.choice.lines()))
    one = prepare_run(with_keys(spec.config, {PACKS: 1}), 4, trace_of())
    assert step_ns(spec) < 0.95 * step_ns(one)
    assert prepared(*keys, "packing.divisor=1", trace=trace_of()).config.packing.divisor == 1
    assert prepared(*keys[1:], trace=trace_of()).config.packing.divisor == 1, "one stage has nothing to fill"
    costly = [*keys[:4], "cluster.launch_ns=1000000"]
    assert prepared(*costly, trace=trace_of()).config.packing.divisor == 1, "each pass starts kernels"


def test_smaller_packs_are_tried_until_they_fit_though_the_next_holds_no_less(monkeypatch):
    def beyond(spec, table, plan, closely=True):
        most = max(sum(batch.layout.lengths) for batch in plan.domain.microbatches)
        return 0 if most <= MICROBATCH // 4 else 1 << 40

    monkeypatch.setattr("omni.planning.prepare.beyond", beyond)
    trace = [SampleMeta(n, "trace", 7, (), 7) for n in range(24)]
    spec = prepared("layout.domain=1", trace=trace, ranks=1)
    assert spec.config.packing.divisor == 4
    assert not spec.choice.best.refused
    assert "packing.divisor=2" in "\n".join(spec.choice.lines())


def test_a_plain_candidate_is_taken_where_smaller_packs_bring_it_more():
    """Of short steps domains of two take less, of a whole one domains of one with packs of a half."""
    whole_steps = {(2, 1): 100, (2, 2): 98, (2, 4): 99, (1, 1): 110, (1, 2): 90, (1, 4): 95}

    def whole_step(keys, beside=None):
        return Tried(keys, whole_steps[keys[DOMAIN], keys[PACKS]])

    best, plain = (Tried({DOMAIN: size, PACKS: 1}, ns) for size, ns in ((2, 50), (1, 60)))
    chosen, found = _packed([best, plain], whole_step, False)
    assert chosen.keys == {DOMAIN: 1, PACKS: 2}
    assert chosen.step_ns == 45, "as much less than the best as on a whole step"
    assert [each.step_ns for each in found] == [50, 49, 49, 55, 45, 47]
    assert found[0] is best
    alone, _ = _packed([best], whole_step, False)
    assert alone.keys == {DOMAIN: 2, PACKS: 2}


@pytest.mark.parametrize(
    "beside, planned",
    [
        (None, 4),
        (Tried({}, 10**15), 4),
        (Tried({}, 1), 1),
        (Tried({}, 1, "does not fit", 10**9), 4),  # all of them fit
    ],
)
def test_a_candidate_that_gains_nothing_in_a_domain_is_planned_in_no_other(monkeypatch, beside, planned):
    spec = prepared("layout.domain=1", "cluster.memory_bytes=1000000000000", trace=trace_of())
    seen, busiest = [], Planner.busiest

    def counted(self, step, cursor):
        for plan, beyond in busiest(self, step, cursor):
            seen.append(plan.number)
            yield plan, beyond

    monkeypatch.setattr(Planner, "busiest", counted)
    found = tried_out(spec.config, {}, lambda config: spec, (1, 0), steps=1, beside=beside)
    assert len(seen) == len(set(seen)) == planned
    assert gains(found, beside or Tried({}, refused="no")) == (planned == 4)


@pytest.mark.parametrize(
    "lean, held, given, chosen",
    [
        (True, 1, [], (2, 1)),
        (True, 2, [], (2, 2)),  # of smaller packs
        (True, 4, [], (1, 1)),
        (False, 1, [], (1, 1)),  # a schedule fits that leaves less bubble
        (True, 1, ["pipeline=encode_first"], (1, 1)),
        (True, 1, ["model.llm.layers=2"], (1, 1)),
    ],
)
def test_two_virtual_stages_are_chosen_where_none_but_a_lean_schedule_fits(
    monkeypatch, lean, held, given, chosen
):
    """With two, packs of so many parts are held, and a step takes a tenth less."""

    def tried(config, keys, **more):
        two = keys.get(VPP) == 2
        if two and keys[PACKS] < held:
            return Tried(keys, 10**6, "does not fit", 10**9)
        return Tried(keys, 10**6 - 10**5 * two, lean=lean)

    monkeypatch.setattr("omni.planning.choose.tried_out", tried)
    config = prepared("layout.llm.pp=2", "model.llm.layers=4", *given).config
    assert (config.layout.llm.vpp, config.packing.divisor) == chosen
    assert prepared("model.llm.layers=4", *given).config.layout.llm.vpp == 1, "one stage"


@pytest.mark.parametrize("lean, even", [(False, True), (True, False)])
def test_how_stages_are_cut_is_chosen_under_the_runs_own_schedule(monkeypatch, lean, even):
    """The schedule that stands in for all takes longer with even stages, and the run's own less."""

    def tried(config, keys, *, make, begin, stands_in=True, **more):
        is_even = keys[CONTEXT] == ANY_CONTEXT
        return Tried(keys, 10**6 + (1 if stands_in else -1) * 10**5 * is_even, lean=lean)

    monkeypatch.setattr("omni.planning.choose.tried_out", tried)
    chosen = prepared("layout=pp2").config.layout.context
    assert (chosen == ANY_CONTEXT) is even
    assert even or chosen == 256


@pytest.mark.parametrize("samples, size", [(4 * 65, 2), (4 * 64, 4)])
def test_packs_that_grow_and_larger_domains_of_long_steps_are_asked_about_the_runs_own_schedule(
    monkeypatch, samples, size
):
    """Under the schedule that stands in, domains of four gain and packs that grow; under the run's own both
    lose.
    """

    def tried(config, keys, *, make, begin, stands_in=True, **more):
        grow, four = keys[PACKING] == "graded", keys[DOMAIN] == 4
        return Tried(keys, 10**6 + (-1 if stands_in else 1) * 10**5 * (grow + four))

    monkeypatch.setattr("omni.planning.choose.tried_out", tried)
    config = prepared("layout=pp2", f"data.step_samples={samples}", ranks=8, trace=trace_of()).config
    assert (config.layout.domain, config.packing.policy) == (size, "first_fit_decreasing")


@pytest.mark.parametrize("passes, packs", [(512, 3), (2048, 12), (64, 1)])
def test_smaller_domains_come_with_how_they_share_and_packs_of_as_many_tokens(passes, packs):
    """Domains of two take passes of `passes` tokens, those of four of 1,024, in three packs."""
    two = {DOMAIN: 2, PASS: passes, LLM_SP: "uniform", ENCODER_SP: "none", PACKS: 1}
    four = {DOMAIN: 4, PASS: 1024, LLM_SP: "dynamic", ENCODER_SP: "dynamic", PACKS: 6}
    slower, refused = {**two, ENCODER_SP: "all"}, {**two, DOMAIN: 3}
    one = {**two, DOMAIN: 1}
    tried = [Tried(slower, 9), Tried(two, 8), Tried(four, 7), Tried(one, 6), Tried(refused, 5, "no")]
    assert _smaller_domains(four, tried) == {**two, PACKS: packs}
    assert _smaller_domains(one, tried) == _smaller_domains({}, tried) == {}


@pytest.mark.parametrize("beyond, taken", [(1000, False), (996, False), (994, True)])
def test_of_two_that_do_not_fit_the_other_is_taken_where_it_is_half_a_hundredth_less_beyond(beyond, taken):
    found, best = (Tried({}, 1, "does not fit", bytes) for bytes in (beyond, 1000))
    assert gains(found, best) == taken
    assert gains(found, best, -GAIN), "the simpler one"


def test_a_candidate_is_tried_once_whatever_is_known_of_it():
    asked = []

    def attempt(config, own, **more):
        asked.append((own, more))
        return Tried(own, 1)

    config = compose_config(KEYS)
    whole_step = on_whole_steps(once_each(attempt), config, 64)
    first = whole_step({BALANCE: "lpt"}, None, True)
    assert whole_step({BALANCE: "lpt"}) is first
    how = {"steps": 1, "beside": None, "lean": True, "stands_in": True}
    assert asked == [({BALANCE: "lpt"}, how)]
    whole_step({BALANCE: "none"})
    once_each(attempt)(config, {BALANCE: "lpt"})
    assert len(asked) == 3
    assert whole_step({BALANCE: "lpt"}, stands_in=False) is not first, "under its own schedule"


def test_of_long_steps_as_many_domains_are_planned_as_tell(monkeypatch):
    """512 samples of a step; if domains are to fit, two of them and 2,048 samples."""
    planned = []
    for samples, memory in ((256, "1000000000000"), (1024, "1000000000000"), (512, "null")):
        keys = "layout.domain=1", f"cluster.memory_bytes={memory}", f"data.step_samples={4 * samples}"
        spec, before = prepared(*keys, trace=trace_of()), len(planned)
        busiest = spec.planner.busiest

        def counted(self, step, cursor, busiest=busiest):
            for found in busiest(step, cursor):
                planned.append(found)
                yield found

        with monkeypatch.context() as patched:
            patched.setattr(Planner, "busiest", counted)
            tried_out(spec.config, {}, lambda config, spec=spec: spec, (1, 0), steps=1)
        planned[before:] = [len(planned) - before]
    assert planned == [4, 2, 1]


def test_a_candidate_that_does_not_fit_in_a_domain_is_planned_in_no_other():
    spec = prepared("layout.domain=1", "cluster.memory_bytes=1000000000000", trace=trace_of())
    seen = []
    spec = replace(
        spec, planner=replace(spec.planner, beyond=lambda plan, closely=True: seen.append(plan.number) or 1)
    )
    found = tried_out(spec.config, {}, lambda config: spec, (1, 0), steps=1)
    assert len(set(seen)) == 1
    assert (found.beyond, bool(found.refused)) == (1, True)


@pytest.mark.parametrize(
    "rounds, fits, tried",
    [
        (None, "zero_bubble_h1", [("zero_bubble_h1", 1)]),
        (None, "encode_first", [("zero_bubble_h1", 1), ("encode_first", None)]),
        (3, "encode_first", [("zero_bubble_h1", 3), ("encode_first", 3)]),
    ],
)
def test_a_step_in_rounds_is_tried_by_the_schedule_that_holds_least(monkeypatch, rounds, fits, tried):
    seen = []

    def simulated(config, keys, **_):
        seen.append((config.pipeline.policy, config.pipeline.rounds))
        return Tried(keys, 1, "" if config.pipeline.policy == fits else "does not fit", 1)

    monkeypatch.setattr("omni.planning.trials._simulated", simulated)
    more = [f"pipeline.rounds={rounds}"] if rounds else []
    config = compose_config([*KEYS, "layout=pp2", *more])
    assert not tried_out(config, {}, lambda config: None, (1, 0)).refused
    assert seen == tried


def of_best_size(short_ns, whole_ns, samples=128, step_ns=10**10):
    """The size of domains that is chosen by what short and whole steps take with each, in units of `step_ns`;
    the candidates that stand otherwise than by their short step; and which sizes were simulated.
    """
    world, simulated = prepared(ranks=8).arrangement, []

    def short_step(keys):
        simulated.append(keys[DOMAIN])
        return Tried(keys, int(short_ns[keys[DOMAIN]] * step_ns))

    def whole_step(keys):
        return Tried(keys, int(whole_ns[keys[DOMAIN]] * step_ns))

    best, others = _of_best_size(
        world, 8, list(short_ns), samples, lambda size: iter([{DOMAIN: size}]), short_step, whole_step
    )
    return best.keys[DOMAIN], {other.keys[DOMAIN]: other.step_ns / step_ns for other in others}, simulated


def test_larger_domains_are_compared_on_a_whole_step_which_evens_out_by_itself():
    """Of short steps domains of 4 take 7 % less than of 2; of whole ones they take 10 % more."""
    short, whole = {1: 2, 2: 1, 4: 0.93, 8: 0.94}, {1: 3, 2: 2, 4: 2.2}
    assert of_best_size(short, whole) == (2, {4: 1.1}, [1, 2, 4, 8])
    assert of_best_size(short, whole, samples=64) == (4, {}, [1, 2, 4, 8]), "a short step is a whole one"
    assert of_best_size(short, {2: 2.2, 4: 2}) == (4, {}, [1, 2, 4, 8])
    assert of_best_size(short, {1: 2, 2: 2.5, 4: 5}) == (1, {2: 2.5, 4: 2}, [1, 2, 4, 8]), "and so is that"


@pytest.mark.parametrize("samples, chosen", [(4 * 64, "lpt"), (4 * 65, "two_constraint")])
def test_a_balance_that_gains_in_a_short_step_is_asked_about_a_whole_one(samples, chosen):
    """In a short step `lpt` takes a tenth less, in a whole one a tenth more."""
    config = compose_config([*KEYS, f"data.step_samples={samples}"])

    def attempt(config, keys, steps=4, beside=None, lean=False):
        other = 110 if steps == 1 else 90
        return Tried(keys, 10**6 * (other if keys[BALANCE] == "lpt" else 100))

    space = SearchSpace(config, open_keys(config), prepared(), [1], MICROBATCH, np.full(8, 9), attempt)
    searched = search_policies(space, {})
    assert searched[0].keys[BALANCE] == chosen


def test_domains_are_as_large_as_planning_is_short_beside_the_step():
    """Planning takes 2 ms a sample; the ranks of a node plan together, but no more than the domain has."""
    short = {1: 1, 2: 0.9, 4: 0.8, 8: 0.7}
    least = of_best_size(short, short, samples=512, step_ns=10**9)
    assert least[2] == [1, 2, 4], "2,048 samples in any case"
    assert of_best_size(short, short, samples=512)[2] == [1, 2, 4, 8]


def test_layers_are_divided_for_the_sequence_that_a_token_is_in_on_average():
    """Of 5,120 tokens 4,096 are in a sequence of as many, 1,024 in one of 1,024: 3,481.6 on average."""
    assert mean_context(np.array([4096, 1024])) == 14 * 256
    assert mean_context(np.array([3, 5])) == 256
    assert prepared("layout=pp2").config.layout.context == 256
    assert prepared().config.layout.context == 4096, "of one stage nothing is divided"
    assert prepared("layout=pp2", "layout.context=77").config.layout.context == 77
    with pytest.raises(ValueError, match=r"layout\.context=0"):
        prepared("layout=pp2", "layout.context=0")


def test_what_long_samples_need_to_be_shared_for_is_no_plain_candidate():
    """A sample that both replicas of two stages hold together, and items that gain nothing by sharing."""
    spec = prepared("layout=pp2", "cluster.op_overhead_ns=0", trace=trace_of(128))
    tried = {text_of(each.keys): each.step_ns for each in spec.choice.tried}
    own = {**spec.choice.best.keys, PACKS: 1}
    simpler = tried.get(text_of({**own, "encoder_sp.policy": "none"}))
    assert simpler is not None
    assert own["encoder_sp.policy"] == "none" or tried[text_of(own)] < 0.995 * simpler
