"""What once made the model of memory differ from rehearsals, one case a cause."""

import re
from pathlib import Path

import pytest
from small import overrides, write_mixed

from omni.commands.plan import plan_of_step
from omni.compose import compose_config
from omni.planning.memory import place_lists
from omni.planning.prepare import prepare_run
from omni.planning.rank_work import rank_work
from omni.rehearsal.footprint_model import model_footprint
from omni.rehearsal.rehearse import rehearse
from parallel.shipping import make_ends


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "mixed"
    write_mixed(path)
    return path


FROZEN = "+optim.components={llm: {frozen: [[1, 9]]}}"
LORA = "model.llm.lora={rank: 8, targets: [linear_qkv, linear_fc2]}"
WIDE = ("model.llm.hidden=256", "model.llm.ffn=1024")
WIDE_IMAGE = ("model.encoders.image.hidden=256", "model.encoders.image.ffn=1024")
# Attention is fullest.
NARROW = ("model.llm.hidden=256", "model.llm.head_dim=128", "model.llm.ffn=64", "model.llm.vocab=300")
NARROW += ("model.llm.loss_chunk=16",)
MOE = "model.llm.moe={experts: 4, topk: 1, ffn: 512, score: softmax, bias_update_rate: 0, dense_layers: 2}"
# Layers are fullest, and what one of them takes in is 0.2 % of all.
AWAY = ("model.llm.layers=8", "model.llm.recompute=full", *NARROW[3:])
# Links on which to share an item costs nothing.
AT_ONCE = [f"cluster.{link}_bytes_per_s={10**12}" for link in ("node_link", "link")]
AT_ONCE += [f"cluster.{link}_latency_ns=0" for link in ("node_link", "link")] + ["cluster.op_overhead_ns=0"]
# A long sequence on two nodes of two cp ranks: each has early and late rows of it, and two tiles.
ON_NODES = ["llm_sp=dynamic", "layout.llm.cp=4", "packing=wlb", "pipeline=zero_bubble_h1", *AT_ONCE]
ON_NODES += ["model.llm.vocab=300", "model.llm.loss_chunk=16", "data.microbatch_tokens=640"]
# An encoder's layers are fullest.
SENT = (*WIDE_IMAGE, "model.encoders.image.recompute=full", "model.llm.layers=2", "model.llm.vocab=300")
SENT += ("model.llm.ffn=64", "model.llm.loss_chunk=16")
LONG = ("model.llm.recompute_long=true", "packing.divisor=4")
FOUND = "+model.encoders.image.keep_attention=true"
KEPT = ("model.llm.recompute=full", "model.llm.keep_attention=true", *NARROW)
CAUSES = {
    "virtual stages share the rotation and gathered tokens": (
        4,
        [0, 3],
        ["layout.llm.tp=2", "layout.llm.pp=2", "layout.llm.vpp=2", "pipeline=interleaved"],
    ),
    "gradients of the output are added up chunk by chunk": (
        2,
        [1],
        ["layout.llm.tp=2", "model.llm.loss_chunk=16", "model.llm.tied=false", "model.llm.vocab=8192"],
    ),
    "a gate has two gradients": (1, [0], ["model.llm.ffn=2048"]),
    "a message is the gradient of the last layer's output": (
        2,
        [0],
        ["layout.llm.pp=2", "model.llm.ffn=256"],
    ),
    "collectives move rows in buffers of all ranks": (
        4,
        [0, 3],
        [
            "placement=disaggregated",
            "placement.ranks=3",
            "pipeline=one_f_one_b",
            "boundary.policy=all_gather",
        ],
    ),
    "experts weigh their products in single precision": (1, [0], [MOE.replace("512", "2048")]),
    "no dispatcher holds a pass that is done": (1, [0], [MOE, "model.llm.recompute=full"]),
    "a frozen expert takes a copy of its weighed product that nobody keeps": (
        4,
        [0],
        [
            MOE.replace("512", "4096").replace("dense_layers: 2", "dense_layers: 0"),
            "model.llm.ffn=64",
            FROZEN,
            "layout.llm.pp=4",
        ],
    ),
    "a frozen LLM keeps no inputs of its linears": (
        1,
        [0],
        [FROZEN, "model.llm.ffn=4096"],
    ),
    "a frozen LLM makes chunks of losses anew from hidden states": (
        1,
        [0],
        [FROZEN, "model.llm.loss_chunk=16", "model.llm.vocab=512"],
    ),
    "rows of a frozen encoder go when they are taken in": (
        1,
        [0],
        ["+optim.components={image: {frozen: [[1, 9]]}}", "model.llm.recompute=full"],
    ),
    "gradients that are put off hold nothing of the pass": (
        2,
        [1],
        ["layout.llm.pp=2", "pipeline=zero_bubble_h2", "model.llm.loss_chunk=16"],
    ),
    "one rank with all of the vocabulary has three tensors of its chunk": (
        1,
        [0],
        ["model.llm.loss_chunk=64", "model.llm.vocab=8192"],
    ),
    "a frozen layer that is computed anew is fullest when it is whole": (
        4,
        [2],
        [FROZEN, "layout.llm.tp=2", "layout.llm.pp=2", "model.llm.recompute=full", "model.llm.hidden=512"],
    ),
    "the output of an encoder's last layer is gone, too": (
        1,
        [0],
        [
            "model.encoders.image.recompute=full",
            "model.encoders.image.hidden=256",
            "model.encoders.image.ffn=2048",
        ],
    ),
    "adapters take inputs of their linears alone, and nothing else learns": (1, [0], [LORA, *WIDE]),
    "what adapters of ranks that divide tokens sum is scattered": (
        2,
        [0, 1],
        [LORA.replace("qkv", "proj").replace("fc2", "fc1"), *WIDE, "layout.llm.tp=2"],
    ),
    "adapters put nothing off": (
        4,
        [0, 3],
        [
            *(LORA, *WIDE, "layout.llm.tp=2", "layout.llm.pp=2", "pipeline=zero_bubble_h1"),
            "model.llm.recompute=full",
        ],
    ),
    "what is frozen around the adapters of an encoder keeps nothing for itself": (
        1,
        [0],
        [f"+model.encoders.image.{LORA.removeprefix('model.llm.')}", *WIDE_IMAGE],
    ),
    "a layer with adapters that is computed anew is counted once": (
        2,
        [0, 1],
        [
            *(f"+model.encoders.image.{LORA.removeprefix('model.llm.')}", *WIDE_IMAGE, "layout.llm.tp=2"),
            *("+layout.encoders.image.tp=2", "model.encoders.image.recompute=full"),
        ],
    ),
    "ranks that take in the same keep a part of it each until a layer is computed anew": (
        4,
        [0, 3],
        [
            *(*WIDE_IMAGE, "model.encoders.image.recompute=full", "model.encoders.image.layers=6"),
            *("model.encoders.image.heads=4", "+layout.encoders.image.tp=4", "layout.llm.pp=4"),
        ],
    ),
    "adapters of a step in which their model is frozen": (1, [0], [LORA, *WIDE, FROZEN.replace("9", "2")]),
    "a rank with both ends has one embedding": (
        1,
        [0],
        ["layout.llm.vpp=2", "pipeline=interleaved", "model.llm.vocab=8192"],
    ),
    "virtual stages of one rank hand gradients on without a message": (
        1,
        [0],
        ["layout.llm.vpp=2", "pipeline=interleaved", "model.llm.recompute=full"],
    ),
    "frozen experts put nothing off": (1, [0], [FROZEN, MOE, "model.llm.recompute=full"]),
    "experts let go of what they took and of gradients of what they put out with the last of them": (
        1,
        [0],
        [MOE.replace("512", "32").replace("topk: 1", "topk: 2"), "model.llm.hidden=512"],
    ),
    "a slot without items encodes empty tokens": (
        3,
        [2],
        [
            *("layout.llm.pp=3", "pipeline=encode_first", "encoder_sp=hybrid_pow2", *AT_ONCE),
            *("data.step_samples=1", "train.seed=2", "model.encoders.image.layers=4"),
        ],
    ),
    "gradients that several tiles make are added up in single precision": (
        8,
        [0],
        [
            *(*ON_NODES, "layout.llm.pp=2", "cluster.ranks_per_node=2", "model.llm.recompute=selective"),
            *("model.llm.hidden=64", "model.llm.heads=2", "model.llm.kv_heads=1", "model.llm.ffn=64"),
        ],
    ),
    "queries are not computed anew with attention": (
        8,
        [0],
        [
            *(*ON_NODES, "layout.llm.pp=2", "cluster.ranks_per_node=2", "model.llm.recompute=selective"),
            *("model.llm.hidden=128", "model.llm.heads=4", "model.llm.kv_heads=2", "model.llm.ffn=64"),
        ],
    ),
    "who computes a layer anew holds the gradient of its output": (
        8,
        [0],
        [
            *(*ON_NODES, "layout.llm.tp=2", "cluster.ranks_per_node=4", "model.llm.recompute=full"),
            *("model.llm.hidden=64", "model.llm.heads=4", "model.llm.kv_heads=2", "model.llm.ffn=64"),
        ],
    ),
    "inputs of layers are on the host but for two of them": (1, [0], [*AWAY, "model.llm.offload=5"]),
    "the input of the last layer goes, too": (1, [0], [*AWAY, "model.llm.offload=7"]),
    "layers in front of experts have their inputs on the host": (
        1,
        [0],
        [*AWAY, MOE.replace("512", "64"), "model.llm.norms=around", "model.llm.offload=3"],
    ),
    "what is put off adds up where nothing else is kept": (
        2,
        [0, 1],
        [*AWAY, "layout.llm.pp=2", "pipeline=zero_bubble_h2", "model.llm.offload=3"],
    ),
    "frozen layers send their inputs, too": (
        2,
        [0, 1],
        [*AWAY, FROZEN, "layout.llm.pp=2", "model.llm.offload=2"],
    ),
    "normed heads are made of a tensor that is kept for their gradient": (
        2,
        [1],
        [*NARROW, "model.llm.qk_norm=true", "layout.llm.cp=2", "llm_sp=all"],
    ),
    "what is computed anew is held with its gradient to the end": (
        1,
        [0],
        [*NARROW, "model.llm.qk_norm=true", "model.llm.recompute=selective"],
    ),
    "gates keep what they let through": (1, [0], [*NARROW, "model.llm.output_gate=true"]),
    "norms of all heads together are made in single precision": (
        2,
        [1],
        [*NARROW, "model.llm.qk_norm=true", "model.llm.qk_norm_over=all", "layout.llm.tp=2"],
    ),
    "norms behind halves keep what these put out": (
        2,
        [1],
        [*NARROW, "model.llm.norms=around", "layout.llm.pp=2", "pipeline=zero_bubble_h1"],
    ),
    "ranks that have gathered the gradient from a norm behind have let go of their own part": (
        2,
        [1],
        [*WIDE, *NARROW[3:], "model.llm.norms=after", "layout.llm.tp=2", "model.llm.layers=2"],
    ),
    "a frozen layer without norms ahead does not keep the stream": (
        2,
        [0, 1],
        [*NARROW, "model.llm.norms=after", FROZEN, "layout.llm.pp=2"],
    ),
    "it does where no rows came to a rank, whose embeddings are what gradients are of": (
        4,
        [0],
        [*NARROW, "model.llm.norms=after", FROZEN, "layout=pp2", "layout.llm.dp=2", "layout.domain=2"],
    ),
    "what is behind experts without a shared one goes with their first step": (
        1,
        [0],
        [*NARROW, "model.llm.hidden=128", "model.llm.norms=after", MOE.replace("512", "256")],
    ),
    **{
        f"an encoder sends {sent} of {layers} inputs to the host, {where}": (
            world,
            sorted({0, world - 1}),
            [*SENT, f"model.encoders.image.layers={layers}", f"+model.encoders.image.offload={sent}", *more],
        )
        for where, (world, more) in {
            "alone": (1, ()),
            "with taps": (1, ("+model.encoders.image.taps=[3]",)),
            "divided": (2, ("layout.llm.tp=2", "+layout.encoders.image.tp=2")),
            "all items ahead": (
                2,
                ("layout.llm.pp=2", "pipeline=encode_first", "+layout.encoders.image.tp=2"),
            ),
        }.items()
        for layers, sent in ((6, 2), (6, 4), (6, 5), (4, 3))
    },
    "embeddings of a frozen LLM stay where layers of a long pass are computed anew": (
        2,
        [0],
        [*LONG, *NARROW, "model.llm.norms=after", FROZEN, "layout=pp2", "model.llm.layers=2"],
    ),
    "passes of long samples keep inputs of layers alone": (1, [0], [*LONG, "model.llm.ffn=2048"]),
    "attention is not computed anew by itself in layers that are": (
        2,
        [0, 1],
        [*LONG, "model.llm.recompute=selective", "layout.llm.tp=2"],
    ),
    "passes whose layers are computed anew put nothing off": (
        2,
        [0, 1],
        [*LONG, "model.llm.ffn=2048", "layout.llm.pp=2", "pipeline=zero_bubble_h2"],
    ),
    "experts of long passes keep nothing": (1, [0], [*LONG, MOE]),
    "layers that are computed anew find what attention put out": (2, [0, 1], [*KEPT, "layout.llm.tp=2"]),
    "so they do where sequences are shared": (4, [0, 3], [*KEPT, *ON_NODES]),
    "and where their inputs are on the host": (1, [0], [*KEPT, *AWAY, "model.llm.offload=5"]),
    "the last of it comes back late": (1, [0], [*KEPT, *AWAY, "model.llm.offload=7"]),
    "and nothing where no gradient comes back": (
        1,
        [0],
        [*KEPT, *AWAY, FROZEN, "model.llm.offload=3", "packing.divisor=8"],
    ),
    "and beside experts": (1, [0], [*KEPT, *AWAY, MOE, "model.llm.offload=3"]),
    **{
        f"an encoder's layers find it, {where}": (world, sorted({0, world - 1}), [*SENT, FOUND, *more])
        for where, (world, more) in {
            "alone": (1, ["model.encoders.image.layers=4"]),
            "divided": (
                2,
                ["model.encoders.image.layers=4", "layout.llm.tp=2", "+layout.encoders.image.tp=2"],
            ),
            "behind taps": (1, ["model.encoders.image.layers=6", "+model.encoders.image.taps=[3]"]),
            "4 on the host": (1, ["model.encoders.image.layers=6", "+model.encoders.image.offload=4"]),
            "5 on the host": (1, ["model.encoders.image.layers=6", "+model.encoders.image.offload=5"]),
            "2 on the host, divided": (
                2,
                [
                    *("model.encoders.image.layers=6", "+model.encoders.image.offload=2"),
                    *("layout.llm.tp=2", "+layout.encoders.image.tp=2", "+model.encoders.image.taps=[3]"),
                ],
            ),
            "shared": (
                4,
                ["model.encoders.image.layers=4", "layout.domain=4", "encoder_sp=dynamic", *AT_ONCE],
            ),
        }.items()
    },
    "gates of what attention put out are computed anew": (
        1,
        [0],
        [*KEPT, "model.llm.output_gate=true", "model.llm.qk_norm=true"],
    ),
    "in passes of long samples alone": (
        2,
        [0, 1],
        [*LONG, *NARROW, "model.llm.keep_attention=true", "layout.llm.pp=2", "pipeline=zero_bubble_h2"],
    ),
    "layers with experts find it, too": (1, [0], [*KEPT, MOE]),
    "the last token of a sample that was cut is no target": (
        1,
        [0],
        ["data.on_long=truncate", "data.microbatch_tokens=100", "model.llm.vocab=8192"],
    ),
}


ALIKE = re.compile("an encoder sends (?!4 of 6)")  # other numbers of inputs

CASES = [pytest.param(cause, marks=pytest.mark.slow) if ALIKE.match(cause) else cause for cause in CAUSES]


@pytest.mark.parametrize("cause", CASES)
def test_the_model_of_memory_knows(data: Path, cause: str) -> None:
    world, ranks, more = CAUSES[cause]
    line = overrides(data, data / "run", "model.llm.layers=4", "train.precision=bf16", *more)
    spec = prepare_run(compose_config([*line, "cluster.queues=one"]), world)
    for rank in ranks:
        plan = plan_of_step(spec, 1, spec.arrangement.domain(rank))
        found, modelled = rehearse(spec, plan, rank).footprint, model_footprint(spec, plan, rank)
        assert modelled.bytes == pytest.approx(found.bytes, rel=1e-3)
        assert modelled.encoding == pytest.approx(found.encoding, rel=1e-3)
        assert modelled.host == found.host
        assert bool(found.host) == any(".offload=" in key for key in more)


@pytest.mark.parametrize("policy", ["two_level", "reduce_scatter", "all_gather"])
def test_it_knows_the_lists_of_places_of_rows(data: Path, policy: str) -> None:
    line = overrides(data, data / "run", "layout.llm.tp=2", "layout.llm.cp=2", "layout.llm.pp=2")
    line += ["cluster.ranks_per_node=2", f"boundary.policy={policy}"]
    spec = prepare_run(compose_config(line), 8)
    plan = plan_of_step(spec, 1)
    listed = 0
    for domain_rank in range(8):
        ends = [make_ends(route, domain_rank) for route in plan.domain.routes if route]
        lists = [tensor for of in ends for tensor in (of.send, of.receive)]
        lists += [tensor for of in ends if of.stop for tensor in (of.stop.order, of.stop.inverse)]
        lists += [of.slots.index for of in ends if of.slots]
        assert place_lists(rank_work(spec, plan, domain_rank)) == sum(tensor.nbytes for tensor in lists)
        listed += len(lists)
    assert listed
