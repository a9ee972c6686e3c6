"""One model and one batch under two configurations: loss, norms, every gradient, weights after some steps.

Layouts, placements and policies are the matter of `test_parity_matrix.py`. Here are models, routers and
policies that need few of them, and what parity must not miss.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity_runs import STEPS, measure
from ranks import RankPool
from small import overrides, with_values, write_mixed

from dataloader.format import DataError, Sample
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from omni.commands._plan_text import _domain
from omni.compose import compose_config
from omni.config import Config
from omni.planning.choice import POLICIES, SCHEDULE, value_of
from omni.planning.fullest import fullest_rank
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.rank import inputs
from omni.rank.optimizer import JointOptimizer
from omni.rehearsal.footprint import Sent
from omni.training.parity import TOLERANCE, WEIGHT_TOLERANCE, Measurement, compare, compare_weights
from parallel.boundary import Route
from parallel.shipping import Ends, make_ends

TP2_PP2 = ["layout.llm.tp=2", "layout.llm.pp=2"]
SELECTIVE = ["model.llm.recompute=selective", "model.encoders.image.recompute=selective"]
LAYERNORM = ["model.llm.norm=LayerNorm", "model.encoders.image.norm=LayerNorm"]
MOE = "model.llm.moe={experts: 4, topk: 2, ffn: 48, shared_ffn: 32, dense_layers: 1}"
SWITCH = "model.llm.moe={experts: 4, topk: 1, ffn: 48, score: softmax, bias_update_rate: 0}"
HEADS = ["model.llm.head_dim=24", "model.llm.qk_norm=true"]
GATES = ["model.llm.gated=false", "+model.encoders.image.gated=true"]
CHEAP_LINKS = ["cluster.node_link_latency_ns=0", "cluster.node_link_bytes_per_s=1000000000000"]
CASES = {
    "tp2 pp2 untied, qkv bias, larger vocabulary": (
        4,
        [*TP2_PP2, "model.llm.tied=false", "model.llm.qkv_bias=true", "model.llm.vocab=301"],
    ),
    "tp2 pp2 selective, heads and norms": (4, [*TP2_PP2, *SELECTIVE, *HEADS]),
    "cp2 tp2 heads and norms, no gates": (4, ["layout.llm.cp=2", "layout.llm.tp=2", *HEADS, *GATES]),
    "tp2 enc tp2 layernorm": (2, ["layout.llm.tp=2", "+layout.encoders.image.tp=2", *LAYERNORM]),
    "tp2 loss in chunks": (2, ["layout.llm.tp=2", "model.llm.loss_chunk=16"]),
    "dp3 in turn": (3, ["balance=none"]),
    "pp2 entrain": (
        2,
        ["layout.llm.pp=2", "packing=entrain", "pairing=in_order", "pipeline=one_f_one_b"],
    ),
    "pp2 disttrain": (2, ["layout.llm.pp=2", "pairing=disttrain"]),
    "cp3 pp2": (6, ["layout.llm.cp=3", "layout.llm.pp=2"]),
    "pp3 system megatron": (3, ["layout.llm.pp=3", "system=megatron"]),
    "dp2 llm long_short": (2, ["llm_sp=long_short", "layout.domain=2", *CHEAP_LINKS]),
    "dp3 dhp": (3, ["llm_sp=dhp", "encoder_sp=dhp", "layout.domain=3", *CHEAP_LINKS]),
    # What is chosen where nobody names a policy (omni.planning.choose).
    "dp2 chosen": (
        2,
        ["layout.domain=2", "llm_sp=dynamic", "encoder_sp=none", "pipeline=auto", *CHEAP_LINKS],
    ),
    "dp2 chosen, nothing shared": (2, ["layout.domain=2", "encoder_sp=dynamic", "balance=lpt", *CHEAP_LINKS]),
    "dp2 pp2 chosen": (
        4,
        [
            *("layout.llm.pp=2", "layout.domain=2", "llm_sp=dynamic", "encoder_sp=dynamic", "pipeline=auto"),
            *("balance=lpt", "pairing=in_order", *CHEAP_LINKS),
        ],
    ),
    # Encoded, passed and gone back through round by round.
    "dp2 pp2 in rounds, shared": (
        4,
        ["layout.llm.pp=2", "layout.domain=2", "encoder_sp=dynamic", "pipeline.rounds=2", *CHEAP_LINKS],
    ),
    "pp4 joint zero_bubble_h1_5": (4, ["layout.llm.pp=4", "pipeline=joint_zero_bubble_h1_5"]),
    "tp2 pp2 joint in rounds": (4, [*TP2_PP2, "pipeline=joint_zero_bubble_h1", "pipeline.rounds=2"]),
    "pp2 joint interleaved in rounds": (
        2,
        ["layout.llm.pp=2", "layout.llm.vpp=2", "pipeline=joint_interleaved", "pipeline.rounds=2"],
    ),
    # Some passes compute all layers anew, others their attention or nothing.
    "tp2 pp2 long passes anew": (
        4,
        [
            *(*TP2_PP2, *SELECTIVE, "model.llm.recompute_long=true", "packing.divisor=2"),
            *("pipeline=joint_zero_bubble_h2", "model.llm.keep_attention=true"),
        ],
    ),
    "moe dp2 pp2 long passes anew, shared": (
        4,
        [
            *(MOE, "layout.llm.pp=2", "layout.domain=2", "llm_sp=dynamic", "encoder_sp=dynamic"),
            *("model.llm.recompute_long=true", "packing.divisor=4", "pipeline=zero_bubble_h1", *CHEAP_LINKS),
            "model.llm.keep_attention=true",
        ],
    ),
    # Texts of 160 tokens: each passes by itself, 40 tokens on every rank.
    "dp4 samples of eight microbatches": (
        4,
        ["llm_sp=dynamic", "layout.domain=4", "data.microbatch_tokens=20", "data.sample_tokens=160"],
    ),
    "pp4 two_level_back": (
        4,
        ["layout.llm.pp=4", "boundary.policy=two_level_back", "cluster.ranks_per_node=2"],
    ),
    "pp2 all_gather": (2, ["layout.llm.pp=2", "boundary.policy=all_gather"]),
    "moe dp2": (2, [MOE]),
    "moe ep2 heads and norms, no gates": (2, [MOE, "layout.llm.ep=2", *HEADS, *GATES]),
    "moe tp2 ep2 switch": (2, [SWITCH, "layout.llm.tp=2", "layout.llm.ep=2"]),
}
# Messages go between the layers of passes.
IN_ONE_QUEUE = {
    "tp2 pp2": (4, [*TP2_PP2, "pipeline=encode_first"]),
    "tp2 pp2 joint zero_bubble_h2": (4, [*TP2_PP2, "pipeline=joint_zero_bubble_h2"]),
    "tp2 pp2 vpp2": (4, [*TP2_PP2, "layout.llm.vpp=2", "pipeline=interleaved"]),
    "dp2 pp2 anew, shared": (
        4,
        [
            *("layout.llm.pp=2", "layout.domain=2", "llm_sp=dynamic", "encoder_sp=dynamic", *CHEAP_LINKS),
            *("model.llm.recompute=full", "pipeline=joint_zero_bubble_h1"),
        ],
    ),
}
# What changes the model must be changed in the reference as well.
MODEL_KEYS = (
    "model.llm.layers",
    "model.llm.tied",
    "model.llm.vocab",
    "model.llm.qkv_bias",
    "model.llm.norm",
    "model.llm.moe",
    "model.llm.head_dim",
    "model.llm.qk_norm",
    "model.llm.gated",
    "model.encoders.image.norm",
    "+model.encoders.image.gated",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parity")
    write_mixed(path)
    return path


def line_of(data: Path, folder: Path, *more: str, samples: int = 8) -> list[str]:
    """A small run of an update that all ranks take, and a step on the new weights."""
    return overrides(data, folder, f"train.steps={STEPS}", *more, samples=samples)


def measure_shifted(rank: int, config: Config, world: int) -> Measurement | None:
    inputs.make_ends = shifted_ends
    try:
        return measure(rank, config, world)
    finally:
        inputs.make_ends = make_ends


def shifted_ends(route: Route, rank: int) -> Ends:
    ends = make_ends(route, rank)
    landings = tuple((point, rows, tokens - 1) for point, rows, tokens in ends.landings)
    return replace(ends, landings=landings)


def measure_loud(rank: int, config: Config, world: int) -> Measurement | None:
    """Count the squares of the image encoder 1.4 times in its norm."""
    squares = JointOptimizer.squares

    def louder(self: JointOptimizer) -> torch.Tensor:
        found = squares(self)
        found[self.names.index("image")] *= 1.4
        return found

    JointOptimizer.squares = louder
    try:
        return measure(rank, config, world)
    finally:
        JointOptimizer.squares = squares


def run(
    ranks: RankPool,
    line: list[str],
    world: int,
    function: Callable[[int, Config, int], Measurement | None] = measure,
) -> Measurement:
    return ranks.run(world, function, compose_config(line), world)[0]


_references: dict[tuple[str, ...], Measurement] = {}


def reference(ranks: RankPool, data: Path, folder: Path, more: list[str]) -> Measurement:
    model = tuple(key for key in more if key.startswith(MODEL_KEYS))
    if model not in _references:
        _references[model] = run(ranks, line_of(data, folder / "reference", *model), 1)
    return _references[model]


def assert_equal(one: Measurement, two: Measurement) -> None:
    worst = compare(one, two)[0]
    assert worst.relative <= TOLERANCE, worst
    worst = compare_weights(one, two)[0]
    assert worst.relative <= WEIGHT_TOLERANCE, worst


@pytest.mark.parametrize("case", CASES)
def test_models_and_policies_equal_one_rank(ranks: RankPool, data: Path, tmp_path: Path, case: str) -> None:
    world, more = CASES[case]
    expected = reference(ranks, data, tmp_path, more)
    assert_equal(expected, run(ranks, line_of(data, tmp_path / "candidate", *more), world))


def measure_in_one_queue(rank: int, config: Config, world: int) -> Measurement | None:
    return measure(rank, config, world, single_queue=True)


@pytest.mark.parametrize("case", IN_ONE_QUEUE)
def test_messages_within_passes_change_nothing(
    ranks: RankPool, data: Path, tmp_path: Path, case: str
) -> None:
    world, more = IN_ONE_QUEUE[case]
    more = [*more, "model.llm.layers=8", "packing.divisor=4"]
    line = line_of(data, tmp_path / "candidate", *more)
    plan = prepare_run(compose_config([*line, "cluster.queues=one"]), world).planner.next_step(1, 0, 0)
    assert any(op.within for ops in plan.domain.ops for op in ops)
    expected = reference(ranks, data, tmp_path, more)
    assert_equal(expected, run(ranks, line, world, measure_in_one_queue))


def named(spec: RunSpec) -> Config:
    """The configuration of a run with what was chosen for it, and the schedule of its first step, by name."""
    assert spec.choice is not None
    own = with_values(spec.config, {SCHEDULE: spec.planner.next_step(1, 0, 0).domain.schedule})
    assert "auto" not in {value_of(own, key) for key in (*POLICIES, SCHEDULE)}
    return own


CHOSEN = ["system=omni", "data.microbatch_tokens=80", "data.sample_tokens=null", *CHEAP_LINKS]


@pytest.mark.parametrize("world, more", [(2, []), (4, ["layout.llm.tp=2"])])
def test_what_is_chosen_equals_one_rank(
    ranks: RankPool, data: Path, tmp_path: Path, world: int, more: list[str]
) -> None:
    spec = prepare_run(compose_config(line_of(data, tmp_path / "candidate", *CHOSEN, *more)), world)
    assert max(spec.planner.next_step(1, 0, 0).taken.lengths) > 80, "no sample is shared for its length"
    expected = reference(ranks, data, tmp_path, [])
    assert_equal(expected, ranks.run(world, measure, named(spec), world)[0])


@pytest.mark.parametrize("more", [[], ["layout.llm.pp=2"]])
def test_what_is_chosen_again_equals_one_rank(
    ranks: RankPool, data: Path, tmp_path: Path, more: list[str]
) -> None:
    """A run on four ranks goes on with two, on the same samples, and both equal one rank. The two share the
    longest sample; in two stages nobody is left to share it, and it passes by itself.
    """
    four = prepare_run(compose_config(line_of(data, tmp_path / "candidate", *CHOSEN, *more)), 4)
    two = prepare_run(four.config, 2)
    assert (two.config.layout.domain, four.config.layout.domain) == ((1, 2) if more else (2, 4))
    assert two.planner.world.take(0) == four.planner.world.take(0)
    expected = reference(ranks, data, tmp_path, [])
    for spec, world in ((four, 4), (two, 2)):
        assert_equal(expected, ranks.run(world, measure, named(spec), world)[0])


def test_a_step_that_does_not_fit_at_once_has_rounds_and_equals_one_rank(
    ranks: RankPool, data: Path, tmp_path: Path
) -> None:
    more = ["layout.llm.pp=2", "layout.domain=2", "encoder_sp=dynamic", *CHEAP_LINKS]
    line = line_of(data, tmp_path / "candidate", *more)
    ample = prepare_run(compose_config(line), 4)
    most = fullest_rank(ample, ample.planner.all_domains(1, 0)).bytes
    spec = prepare_run(compose_config([*line, f"cluster.memory_bytes={most - 1}"]), 4)
    plan = spec.planner.next_step(1, 0, 0)
    assert plan.domain.rounds > 1
    assert spec.planner.beyond(plan) <= 0
    expected = reference(ranks, data, tmp_path, [])
    assert_equal(expected, ranks.run(4, measure, spec.config, 4)[0])


@pytest.mark.parametrize("case", [case for case in CASES if "long passes anew" in case])
def test_some_passes_are_long_and_others_not(data: Path, tmp_path: Path, case: str) -> None:
    world, more = CASES[case]
    spec = prepare_run(compose_config(line_of(data, tmp_path / "candidate", *more)), world)
    plan = spec.planner.next_step(1, 0, 0)
    spec.planner.verify(plan)
    anew = [batch.anew for batch in plan.domain.microbatches]
    assert {*anew} == {False, True}
    said = next(line for line in _domain(spec, plan, {0: Sent(0, 0, 0)}) if "computed anew" in line)
    assert said.split() == (
        f"all layers computed anew in {sum(anew)} of {len(anew)} microbatches, but for attention".split()
    )


@pytest.mark.parametrize("case", [case for case in CASES if "in rounds" in case])
def test_a_step_of_several_rounds_has_them(data: Path, tmp_path: Path, case: str) -> None:
    world, more = CASES[case]
    spec = prepare_run(compose_config(line_of(data, tmp_path, *more)), world)
    assert spec.planner.next_step(1, 0, 0).domain.rounds == spec.config.pipeline.rounds


def test_the_batch_is_uneven(data: Path, tmp_path: Path) -> None:
    spec = prepare_run(compose_config(line_of(data, tmp_path, "layout=pp2")), 2)
    domain = spec.planner.next_step(1, 0, 0).domain
    assert None in domain.routes, "no microbatch is without items"
    rows = [sum(c.rows_of(rank) for c in domain.encoder_batches if rank in c.ranks) for rank in (0, 1)]
    assert rows[0] != rows[1]
    assert min(rows) > 0


def test_shifted_placeholders_are_caught(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    expected = reference(ranks, data, tmp_path, [])
    line = line_of(data, tmp_path / "candidate", "layout=pp2")
    worst = compare(expected, run(ranks, line, 2, measure_shifted))[0]
    assert worst.relative > 100 * TOLERANCE


def test_a_wrong_norm_of_one_component_is_caught(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    expected = reference(ranks, data, tmp_path, [])
    line = line_of(data, tmp_path / "candidate", "layout=pp2")
    worst, *others = compare(expected, run(ranks, line, 2, measure_loud))
    assert worst.name == "squared norm of image"
    assert worst.relative == pytest.approx(0.4, rel=1e-3)
    assert others[0].relative <= TOLERANCE, "the gradients themselves are right"


def test_norms_are_those_of_the_gradients(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    """So that no layout can agree with a reference that is wrong itself: sums are targets times means."""
    one = reference(ranks, data, tmp_path, [])
    found = []
    for component, square in one.squares.items():
        own = [g for name, g in one.gradients.items() if name.startswith(component + "/")]
        found.append(math.sqrt(square / sum(float(g.double().square().sum()) for g in own)))
    assert len(found) == 2
    assert found == pytest.approx([round(found[0])] * 2, rel=TOLERANCE)


@pytest.mark.parametrize("frozen", ["image", "llm"])
def test_frozen_components_stay_and_the_rest_agrees(
    ranks: RankPool, data: Path, tmp_path: Path, frozen: str
) -> None:
    more = [f"+optim.components={{{frozen}: {{frozen: [[1, 2]]}}}}"]
    one = run(ranks, line_of(data, tmp_path / "reference", *more), 1)
    two = run(ranks, line_of(data, tmp_path / "candidate", *more, "layout=pp2"), 2)
    assert not any(name.startswith(frozen + "/") for name in one.gradients)
    assert_equal(one, two)


def test_a_component_that_is_frozen_throughout_does_not_change(
    ranks: RankPool, data: Path, tmp_path: Path
) -> None:
    before = run(ranks, line_of(data, tmp_path / "a", "train.steps=1", "optim.lr=0"), 1)
    more = "+optim.components={image: {frozen: [[1, 9]]}}"
    after = run(ranks, line_of(data, tmp_path / "b", more), 1)
    for name, weight in after.weights.items():
        assert torch.equal(weight, before.weights[name]) == name.startswith("image/"), name


@pytest.mark.parametrize(("world", "layout"), [(1, []), (2, ["layout.llm.ep=2"])])
def test_biases_of_experts_stand_still_while_the_llm_is_frozen(
    ranks: RankPool, data: Path, tmp_path: Path, world: int, layout: list[str]
) -> None:
    def biases(steps: int, *more: str) -> torch.Tensor:
        line = line_of(data, tmp_path / f"{steps}{len(more)}", MOE, *layout, f"train.steps={steps}", *more)
        weights = run(ranks, line, world).weights
        return torch.cat([of for name, of in weights.items() if name.endswith(".expert_bias")])

    first, moved = biases(1), biases(2)
    assert torch.count_nonzero(first)
    assert not torch.equal(moved, first)
    assert torch.equal(biases(2, "+optim.components={llm: {frozen: [[2, 9]]}}"), first)


def _refusal(rank: int, config: Config) -> str:
    try:
        measure(rank, config, 1)
    except DataError as error:
        return str(error)
    return "measured"


def test_a_first_step_without_targets_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "data", ByteTokenizer()) as writer:
        for i in range(4):
            writer.add(Sample(str(i), "nothing to learn", targets=()))
    line = line_of(tmp_path / "data", tmp_path / "run", samples=2)
    (message,) = ranks.run(1, _refusal, compose_config(line))
    assert message.startswith("step 1 has no target token")
    assert "data.step_samples" in message


def test_weights_near_zero_are_held_to_a_small_weights_size() -> None:
    """A bias that began at 0: rounding of 3e-8 in its gradient times lr / ε = 10, two steps."""
    bias, noise = torch.full((8,), 2e-3), torch.full((8,), 6e-7)

    def weights(of: torch.Tensor) -> Measurement:
        return Measurement(1.0, {}, {}, {"llm/bias": of, "llm/weight": torch.ones(10)})

    (worst, _) = compare_weights(weights(bias), weights(bias + noise))
    assert worst.name == "llm/bias"
    assert worst.relative == pytest.approx(6e-5, rel=1e-3)
    (worst, _) = compare_weights(weights(bias), weights(bias * 1.01))
    assert worst.relative > WEIGHT_TOLERANCE, "a wrong update is no rounding"
