"""What the tensors of these families are called, and of which a parameter of ours is made."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from omni.open_models.rules import Rule, Slab

_OURS, _THEIRS = "decoder.layers.{}", "model.layers.{}"
# Where norms stand decides what they are called.
_NORMS = {
    "before": {"input": "input", "pre_mlp": "post_attention"},
    "around": {
        **{"input": "input", "post_attention": "post_attention"},
        **{"pre_mlp": "pre_feedforward", "post_mlp": "post_feedforward"},
    },
    "after": {"post_attention": "post_attention", "post_mlp": "post_feedforward"},
}


def _rules(keys: Mapping[str, Any], moe: str, gate: str, up: str, down: str) -> Iterator[Rule]:
    """The rules of all these families: they differ in the names of a mixture and of its experts' matrices."""
    hidden, ffn, vocab = keys["hidden"], keys["ffn"], keys["vocab"]
    head = keys["head_dim"] or hidden // keys["heads"]
    queries, values = keys["heads"] * head, keys["kv_heads"] * head
    experts = keys["moe.experts"]
    layers = range(keys["layers"])
    dense = range(keys["moe.dense_layers"] if experts else len(layers))
    yield Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (vocab,), hidden)
    if not keys["tied"]:
        yield Rule("output_layer.weight", ("lm_head.weight",), (vocab,), hidden)
    yield Rule("decoder.final_layernorm.weight", ("model.norm.weight",), (hidden,))

    def same(ours: str, theirs: str, rows: int, columns: int | None = None, *each: range) -> Rule:
        return Rule(f"{_OURS}.{ours}", (f"{_THEIRS}.{theirs}",), (rows,), columns, each=each or (layers,))

    def heads(kind: str, columns: int | None) -> Rule:
        theirs = tuple(f"{_THEIRS}.self_attn.{part}_proj.{kind}" for part in "qkv")
        rows, ours = (queries, values, values), f"{_OURS}.self_attention.linear_qkv.{kind}"
        return Rule(ours, theirs, rows, columns, keys["kv_heads"], (layers,))

    def gated(
        ours: str, theirs: str, names: tuple[str, str], rows: int, *each: range, kind: str = "weight"
    ) -> Rule:
        both = tuple(f"{_THEIRS}.{theirs}.{name}.{kind}" for name in names)
        columns = hidden if kind == "weight" else None
        return Rule(f"{_OURS}.{ours}.linear_fc1.{kind}", both, (rows, rows), columns, each=each)

    for ours, theirs in _NORMS[keys["norms"]].items():
        yield same(f"{ours}_layernorm.weight", f"{theirs}_layernorm.weight", hidden)
    yield heads("weight", hidden)
    if keys["qkv_bias"]:
        yield heads("bias", None)
    yield same("self_attention.linear_proj.weight", "self_attn.o_proj.weight", hidden, queries)
    if keys["output_bias"]:
        yield same("self_attention.linear_proj.bias", "self_attn.o_proj.bias", hidden)
    if keys["qk_norm"]:
        wide = keys["qk_norm_over"] == "all"
        for part, size in (("q", queries if wide else head), ("k", values if wide else head)):
            yield same(f"self_attention.{part}_layernorm.weight", f"self_attn.{part}_norm.weight", size)
    yield gated("mlp", "mlp", ("gate_proj", "up_proj"), ffn, dense)
    yield same("mlp.linear_fc2.weight", "mlp.down_proj.weight", hidden, ffn, dense)
    if keys["ffn_bias"] and dense:
        yield gated("mlp", "mlp", ("gate_proj", "up_proj"), ffn, dense, kind="bias")
        yield same("mlp.linear_fc2.bias", "mlp.down_proj.bias", hidden, None, dense)
    if experts:
        sparse, each, width = layers[len(dense) :], range(experts), keys["moe.ffn"]
        yield same("mlp.router.weight", f"{moe}.gate.weight", experts, hidden, sparse)
        yield gated("mlp.experts.{}", f"{moe}.experts.{{}}", (gate, up), width, sparse, each)
        theirs = f"{moe}.experts.{{}}.{down}.weight"
        yield same("mlp.experts.{}.linear_fc2.weight", theirs, hidden, width, sparse, each)
        if shared := keys["moe.shared_ffn"]:
            yield gated("mlp.shared_experts", f"{moe}.shared_expert", (gate, up), shared, sparse)
            theirs = f"{moe}.shared_expert.{down}.weight"
            yield same("mlp.shared_experts.linear_fc2.weight", theirs, hidden, shared, sparse)
        if keys["moe.shared_gate"]:
            theirs = f"{moe}.shared_expert_gate.weight"
            yield same("mlp.shared_experts.gate_weight", theirs, 1, hidden, sparse)


def gpt_oss_rules(keys: Mapping[str, Any]) -> Iterator[Rule]:
    """All experts of a layer are one tensor: matrices transposed, gate and what it gates in turn."""
    for rule in _rules(keys, "mlp", "gate_proj", "up_proj", "down_proj"):
        if ".experts." not in rule.ours and "router" not in rule.ours:
            yield rule
    hidden, width, experts = keys["hidden"], keys["moe.ffn"], keys["moe.experts"]
    layers = range(keys["layers"])
    sinks = f"{_OURS}.self_attention.core_attention.sinks"
    yield Rule(sinks, (f"{_THEIRS}.self_attn.sinks",), (keys["heads"],), each=(layers,))
    for kind, columns in (("weight", hidden), ("bias", None)):
        router = f"mlp.router.{kind}"
        yield Rule(f"{_OURS}.{router}", (f"{_THEIRS}.{router}",), (experts,), columns, each=(layers,))
    for ours, theirs, rows, inputs, parts in (
        ("linear_fc1", "gate_up_proj", 2 * width, hidden, 2),
        ("linear_fc2", "down_proj", hidden, width, 1),
    ):
        name, of = f"{_OURS}.mlp.experts.{{}}.{ours}", f"{_THEIRS}.mlp.experts.{theirs}"
        both, slab = (layers, range(experts)), Slab(experts, parts)
        matrix = replace(slab, transposed=True)
        yield Rule(f"{name}.weight", (of,), (rows,), inputs, each=both, slab=matrix)
        yield Rule(f"{name}.bias", (f"{of}_bias",), (rows,), each=both, slab=slab)


def plain_rules(keys: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Rules of families that call their tensors as Llama does."""
    return tuple(_rules(keys, "mlp", "gate_proj", "up_proj", "down_proj"))


def mixtral_rules(keys: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Rules of Mixtral, whose experts have other names."""
    return tuple(_rules(keys, "block_sparse_moe", "w1", "w3", "w2"))
