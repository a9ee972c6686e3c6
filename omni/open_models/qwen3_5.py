"""Qwen3.5, Qwen3.6 and Qwen3-Next: gated delta nets in most layers, gated attention in the others.

Published folders hold a vision tower beside the text model and layers that predict further tokens: both are
no weights of ours, and copied through.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any

from omni.open_models.families import SKIPPED, rotation
from omni.open_models.family import Family, Said
from omni.open_models.rules import Rule, Runs, Slab
from omni.open_models.whole import TOWER, beside_tower

_OURS = "decoder.layers.{}"
_KINDS = {"linear_attention": "delta", "full_attention": "full"}
# How a text model is put beside a tower.
_OF_TEXT = (
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    "mamba_ssm_dtype",
    "full_attention_interval",
)


def _text(said: Said) -> dict[str, Any]:
    said.skip(*SKIPPED, *_OF_TEXT)
    said.must("hidden_act", "silu")
    said.must("attention_bias", False)
    said.must("attention_dropout", 0)
    said.must("attn_output_gate", True)
    said.must("mlp_only_layers", [])
    told = dict(said.take("rope_parameters"))
    sections, in_turn = told.pop("mrope_section", None) or [], told.pop("mrope_interleaved", True)
    if not in_turn:
        raise said.refused("mrope_interleaved", in_turn, "layers of this family interleave the three axes")
    told.setdefault("partial_rotary_factor", 0.25)
    heads, hidden = said.take("num_attention_heads"), said.take("hidden_size")
    layers, head_dim = said.take("num_hidden_layers"), said.take("head_dim")
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": said.take("num_key_value_heads"),
        "head_dim": None if head_dim == hidden // heads else head_dim,
        "attention": _pattern(said, layers),
        "delta.key_heads": said.take("linear_num_key_heads"),
        "delta.value_heads": said.take("linear_num_value_heads"),
        "delta.key_dim": said.take("linear_key_head_dim"),
        "delta.value_dim": said.take("linear_value_head_dim"),
        "delta.conv": said.take("linear_conv_kernel_dim"),
        "output_gate": True,
        "qk_norm": True,
        "norm_zero_centered": True,
        "norm_eps": said.take("rms_norm_eps"),
        **rotation(said, told, whole=False),
        **({"rotary.sections": sections, "rotary.interleaved": True} if sections else {}),
        "tied": said.take("tie_word_embeddings", False),
        "vocab": said.take("vocab_size"),
    }


def _pattern(said: Said, layers: int) -> list[str]:
    """The kinds of layers, as short as they repeat."""
    listed = said.take("layer_types")
    if len(listed) != layers or set(listed) - _KINDS.keys() or "linear_attention" not in listed:
        raise said.refused("layer_types", listed, f"{layers} layers are of {', '.join(_KINDS)}")
    kinds = [_KINDS[kind] for kind in listed]
    periods = range(1, layers + 1)
    return kinds[: next(n for n in periods if all(kind == kinds[at % n] for at, kind in enumerate(kinds)))]


def _dense(said: Said) -> dict[str, Any]:
    return {"ffn": said.take("intermediate_size"), **_text(said)}


def _moe(said: Said) -> dict[str, Any]:
    said.must("output_router_logits", False)
    said.must("norm_topk_prob", True)
    said.must("decoder_sparse_step", 1)
    width = said.take("moe_intermediate_size")
    said.skip("intermediate_size")
    return {
        "ffn": width,
        "moe.experts": said.take("num_experts"),
        "moe.topk": said.take("num_experts_per_tok"),
        "moe.ffn": width,
        "moe.shared_ffn": said.take("shared_expert_intermediate_size"),
        "moe.shared_gate": True,
        "moe.score": "softmax",
        "moe.bias_update_rate": 0.0,
        **_text(said),
    }


def _order(pieces: Sequence[int], groups: int) -> list[Runs]:
    """Rows of ours that are, in each of so many groups, pieces of these sizes: where those of each piece are,
    group by group.
    """
    starts, size = [*accumulate(pieces, initial=0)], sum(pieces)
    return [
        tuple((group * size + start, piece) for group in range(groups))
        for start, piece in zip(starts, pieces, strict=False)
    ]


def _in_turn(several: Sequence[Runs]) -> Runs:
    """Runs of several pieces, of each group one after the other: as their tensors are mixed, by heads."""
    return tuple(chain.from_iterable(zip(*several, strict=True)))


def _rules(keys: Mapping[str, Any], root: str, mixed: bool, fused: bool) -> Iterator[Rule]:
    """The rules of a text model whose tensors are under `root`. With `mixed` the linears of a delta net are
    those of Qwen3-Next: by heads of keys, what the rule reads and gates in one, b and a in another. With
    `fused` all experts of a layer are two tensors.
    """
    hidden, vocab, count = keys["hidden"], keys["vocab"], keys["layers"]
    kinds = [keys["attention"][layer % len(keys["attention"])] for layer in range(count)]
    of_delta = [layer for layer in range(count) if kinds[layer] == "delta"]
    of_heads = [layer for layer in range(count) if kinds[layer] == "full"]
    yield Rule("embedding.word_embeddings.weight", (f"{root}.embed_tokens.weight",), (vocab,), hidden)
    if not keys["tied"]:
        yield Rule("output_layer.weight", ("lm_head.weight",), (vocab,), hidden)
    yield Rule("decoder.final_layernorm.weight", (f"{root}.norm.weight",), (hidden,))

    def rule(ours: str, theirs: Any, rows: Any, columns: Any, *each: Sequence[int], **more: Any) -> Rule:
        names = (theirs,) if isinstance(theirs, str) else theirs
        counts = (rows,) if isinstance(rows, int) else tuple(rows)
        full = tuple(f"{root}.layers.{{}}.{name}" for name in names)
        return Rule(f"{_OURS}.{ours}", full, counts, columns, each=each, **more)

    every = range(count)
    yield rule("input_layernorm.weight", "input_layernorm.weight", hidden, None, every)
    yield rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", hidden, None, every)
    yield from _attention(keys, partial(rule), of_heads)
    yield from _delta(keys, partial(rule), of_delta, mixed)
    if not keys["moe.experts"]:
        yield from _gated(rule, "mlp", "mlp", keys["ffn"], hidden, every)
        return
    experts = range(keys["moe.experts"])
    yield rule("mlp.router.weight", "mlp.gate.weight", len(experts), hidden, every)
    if fused:
        yield from _fused(rule, keys["moe.ffn"], hidden, every, experts)
    else:
        yield from _gated(rule, "mlp.experts.{}", "mlp.experts.{}", keys["moe.ffn"], hidden, every, experts)
    yield from _gated(rule, "mlp.shared_experts", "mlp.shared_expert", keys["moe.shared_ffn"], hidden, every)
    yield rule("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", 1, hidden, every)


def _gated(rule: Any, ours: str, theirs: str, ffn: int, hidden: int, *each: Sequence[int]) -> Iterator[Rule]:
    both = f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight"
    yield rule(f"{ours}.linear_fc1.weight", both, (ffn, ffn), hidden, *each)
    yield rule(f"{ours}.linear_fc2.weight", f"{theirs}.down_proj.weight", hidden, ffn, *each)


def _fused(rule: Any, ffn: int, hidden: int, layers: Sequence[int], experts: Sequence[int]) -> Iterator[Rule]:
    """Experts one after the other, each as ours: gate over up [2 · ffn, hidden], and down [hidden, ffn]."""
    slab, ours, theirs = Slab(len(experts)), "mlp.experts.{}", "mlp.experts"
    both = layers, experts
    yield rule(f"{ours}.linear_fc1.weight", f"{theirs}.gate_up_proj", 2 * ffn, hidden, *both, slab=slab)
    yield rule(f"{ours}.linear_fc2.weight", f"{theirs}.down_proj", hidden, ffn, *both, slab=slab)


def _attention(keys: Mapping[str, Any], rule: Any, layers: Sequence[int]) -> Iterator[Rule]:
    """Of each key/value head ours has its queries, their gates, its key, its value; theirs a gate a query."""
    hidden, groups = keys["hidden"], keys["kv_heads"]
    head, each = keys["head_dim"] or hidden // keys["heads"], keys["heads"] // groups
    pieces = _order([head] * (2 * each + 2), groups)
    *of_queries, key, value = pieces
    turns = [of for query in range(each) for of in (of_queries[query], of_queries[each + query])]
    theirs = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")
    rows = 2 * keys["heads"] * head, groups * head, groups * head
    order = (_in_turn(turns), key, value)
    yield rule("self_attention.linear_qkv.weight", theirs, rows, hidden, layers, order=order)
    out = keys["heads"] * head
    yield rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight", hidden, out, layers)
    yield rule("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", head, None, layers)
    yield rule("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", head, None, layers)


def _delta(keys: Mapping[str, Any], rule: Any, layers: Sequence[int], mixed: bool) -> Iterator[Rule]:
    """Of each head of keys ours has its query, key, values, b, a and gates; theirs all queries, then all
    keys, and so on, or mixed by heads of keys.
    """
    hidden, groups, heads = keys["hidden"], keys["delta.key_heads"], keys["delta.value_heads"]
    key, values = keys["delta.key_dim"], heads // groups * keys["delta.value_dim"]
    query_runs, key_runs, value_runs, b, a, gates = _order(
        [key, key, values, heads // groups, heads // groups, values], groups
    )
    read = groups * (2 * key + values)
    if mixed:
        names, rows = ["in_proj_qkvz", "in_proj_ba"], [read + groups * values, 2 * heads]
        order = [_in_turn((query_runs, key_runs, value_runs, gates)), _in_turn((b, a))]
    else:
        names = ["in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z"]
        rows = [read, heads, heads, groups * values]
        order = [(*query_runs, *key_runs, *value_runs), b, a, gates]
    theirs = tuple(f"linear_attn.{name}.weight" for name in names)
    yield rule("self_attention.linear_in.weight", theirs, rows, hidden, layers, order=tuple(order))
    channels = (tuple(chain(*_order([key, key, values], groups))),)
    taps = (1, keys["delta.conv"])
    yield rule("self_attention.conv_weight", "linear_attn.conv1d.weight", read, taps, layers, order=channels)
    yield rule("self_attention.A_log", "linear_attn.A_log", heads, None, layers)
    yield rule("self_attention.dt_bias", "linear_attn.dt_bias", heads, None, layers)
    yield rule("self_attention.norm.weight", "linear_attn.norm.weight", keys["delta.value_dim"], None, layers)
    yield rule(
        "self_attention.linear_proj.weight", "linear_attn.out_proj.weight", hidden, groups * values, layers
    )


def _of(root: str, mixed: bool = False, fused: bool = False) -> Any:
    return lambda keys: tuple(_rules(keys, root, mixed, fused))


_COPIED = ("mtp.*", "model.visual.*")
_WHOLE, _TEXT = "model.language_model", "model"
QWEN3_5 = Family(partial(beside_tower, _dense), _of(_WHOLE), _COPIED, encoders=TOWER)
QWEN3_5_TEXT = Family(_dense, _of(_TEXT), _COPIED)
# Published folders hold all experts of a layer as one, text models that were saved apart each by itself.
QWEN3_5_MOE = Family(partial(beside_tower, _moe), _of(_WHOLE, fused=True), _COPIED, (_of(_WHOLE),), TOWER)
QWEN3_5_MOE_TEXT = Family(_moe, _of(_TEXT), _COPIED, (_of(_TEXT, fused=True),))
QWEN3_NEXT = Family(_moe, _of(_TEXT, mixed=True), _COPIED)
