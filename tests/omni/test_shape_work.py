"""Work against the equations: sizes of heads, windows, latent attention, prediction of further tokens."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from work_costs import even_cluster

from omni.config import ConfigError
from omni.keys import check_keys
from omni.llm_config import LLMConfig
from omni.llm_sections import MLAConfig, MoEConfig
from omni.models.encoders.vit import ViTConfig, ViTEncoder
from omni.models.latent import Latent
from omni.models.llm import llm_work
from parallel.costs import work_cost
from parallel.layout import Layout
from parallel.work import Grad, Part, even_load

# One layer of width 48 with 6 heads: width, heads, feed-forward, padded vocabulary, tokens.
D, N, F, V, T = 48, 6, 80, 264, 720_720
LLM = LLMConfig(layers=1, hidden=D, heads=N, kv_heads=2, ffn=F, tied=False)
MLA = MLAConfig(q_rank=20, kv_rank=12, nope_dim=16, rope_dim=8, value_dim=10)
LATENT = replace(LLM, kv_heads=N, mla=MLA)
SQUARES = 10**9
CLUSTER = even_cluster("test", 10**15, 0.5, moved_per_s=10**12, op_overhead_ns=100)


def size(part: Part) -> int:
    return sum(weight.elements for weight in part.weights())


def whole(llm: LLMConfig, element: int = 2) -> Part:
    (part,) = llm_work(llm, 260, Layout(), element)
    return part


def token_and_square(part: Part) -> tuple[float, float]:
    """Forward FLOPs of a token, outputs aside, and of a unit of squared length."""
    routed = (T,) * part.ep
    tokens, squares = (part.forward(even_load(T, n, routed=routed)).flops for n in (0, SQUARES))
    return tokens / T, (squares - tokens) / SQUARES


def test_a_plain_layer_is_what_its_equations_say() -> None:
    heads = 2 * D * 8 * (N + 2 + 2) + 2 * N * 8 * D  # Q, K and V; the output
    assert token_and_square(whole(LLM)) == (heads + 2 * 3 * D * F, 4 * N * 8 / 2)


def test_heads_may_have_a_size_of_their_own_and_norms() -> None:
    part = whole(replace(LLM, head_dim=12, qk_norm=True))
    heads = 2 * D * 12 * (N + 2 + 2) + 2 * N * 12 * D
    assert token_and_square(part) == (heads + 2 * 3 * D * F, 4 * N * 12 / 2)
    more = D * 4 * (N + 2 + 2) + N * 4 * D + 2 * 12  # of each head four numbers; two norms
    assert size(part) == size(whole(LLM)) + more
    assert part.head_dim == 12


def test_without_gates_there_are_two_matrices() -> None:
    part, gated = whole(replace(LLM, gated=False)), whole(LLM)
    assert token_and_square(gated)[0] - token_and_square(part)[0] == 2 * D * F
    assert size(gated) - size(part) == D * F
    experts = MoEConfig(experts=4, topk=2, ffn=F, shared_ffn=F)
    part, gated = whole(replace(LLM, gated=False, moe=experts)), whole(replace(LLM, moe=experts))
    assert token_and_square(gated)[0] - token_and_square(part)[0] == 3 * 2 * D * F  # two chosen, one shared
    assert size(gated) - size(part) == 5 * D * F


@pytest.mark.parametrize(("every", "with_window"), [(1, 7), (2, 4), (3, 3)])
def test_a_window_costs_each_token_as_much(every: int, with_window: int) -> None:
    llm = replace(LLM, layers=7, window=100, attention=["window", *["full"] * (every - 1)])
    plain = token_and_square(whole(replace(llm, window=None, attention=["full"])))
    token, square = token_and_square(whole(llm))
    pairs = 2 * 2 * N * 8  # QK and PV of a query and a key
    assert token - plain[0] == with_window * 100 * pairs
    assert square == (7 - with_window) * pairs / 2
    # The parts of a pipeline have the windows of the layers that they hold.
    parts = [token_and_square(part) for part in llm_work(llm, 260, Layout(pp=3), 2)]
    assert sum(part[0] for part in parts) == token
    assert sum(part[1] for part in parts) == square


def test_windows_make_costs_linear_in_tokens() -> None:
    windows = work_cost(whole(replace(LLM, window=100, attention=["window"])), CLUSTER, {})
    assert windows.stated.forward.square_fs == 0
    once, more = (windows.forward_ns(tokens, 0) - windows.forward_ns(0, 0) for tokens in (T, 10 * T))
    assert more == pytest.approx(10 * once, rel=1e-6)
    full = work_cost(whole(replace(LLM, window=100, attention=["window"], recompute="full")), CLUSTER, {})
    assert [of.back_exchanges for of in (windows, full)] == [1, 2]
    back = [of.backward_ns(T, 0) - of.backward_ns(0, 0) for of in (windows, full)]
    assert 0 < back[1] - back[0] < once, "all but the output once more"


def test_an_encoder_sees_all_in_some_layers() -> None:
    sizes = {"layers": 4, "hidden": D, "heads": N, "ffn": F}
    plain, windows = (
        ViTEncoder(ViTConfig(**sizes, **more)).work(64, 2)
        for more in ({}, {"window": 64, "full_layers": [1, 3]})
    )
    assert token_and_square(windows)[0] - token_and_square(plain)[0] == 2 * 64 * 4 * D
    assert token_and_square(plain)[1] == 2 * token_and_square(windows)[1] == 4 * 4 * D
    gated = ViTEncoder(ViTConfig(**sizes, gated=True)).work(64, 2)
    assert token_and_square(gated)[0] - token_and_square(plain)[0] == 4 * 2 * D * F


@pytest.mark.parametrize("q_rank", [20, 0])
def test_latent_attention_is_what_its_equations_say(q_rank: int) -> None:
    part = whole(replace(LATENT, mla=replace(MLA, q_rank=q_rank)))
    queries = D * 20 + 20 * N * 24 if q_rank else D * N * 24
    linears = queries + D * (12 + 8) + 12 * N * (16 + 10) + N * 10 * D
    assert token_and_square(part) == (2 * linears + 2 * 3 * D * F, (2 * N * 24 + 2 * N * 10) / 2)
    norms = 12 + q_rank + 3 * D  # of the compressed; of attention, feed-forward and output
    assert size(part) == linears + 3 * D * F + norms + 2 * V * D
    load = even_load(T, SQUARES)
    assert part.backward(load, Grad.BOTH).flops == 2 * part.forward(load).flops


class Attend(torch.autograd.Function):
    """Stands for attention: keeps queries, keys, values, output, and a number for each query and head."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = value.clone()
        ctx.save_for_backward(query, key, value, out, query.new_zeros(query.shape[:2]))
        return out


class Normed(torch.autograd.Function):
    """Stands for a norm: keeps its input and what it divided by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x.new_zeros(len(x)))
        return x.clone()


def test_latent_attention_keeps_what_a_program_of_its_equations_keeps() -> None:
    tokens, kept = 50, {}
    shapes = {"dq": (D, 20), "uq": (20, N * 24), "dkv": (D, 20), "ukv": (12, N * 26), "o": (N * 10, D)}
    w = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}
    x = torch.randn(tokens, D, requires_grad=True)  # what the norm in front puts out: another's to count

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)
        return tensor

    held: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        query = (Normed.apply(x @ w["dq"]) @ w["uq"]).view(tokens, N, 24)
        both = x @ w["dkv"]
        heads = (Normed.apply(both[:, :12]) @ w["ukv"]).view(tokens, N, 26)
        query = torch.cat([query[..., :16], query[..., 16:].flip(-1)], -1)
        shared = both[:, None, 12:].flip(-1).expand(-1, N, -1)
        key = torch.cat([heads[..., :16], shared], -1)
        out = Attend.apply(query, key, heads[..., 16:]).flatten(1) @ w["o"]
    for tensor in (x, *w.values()):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    latent = Latent(D, N, **vars(MLA))
    assert out.shape == (tokens, D)
    assert latent.kept(tokens, tokens, tp=1, element=4) == sum(kept.values())
    inputs, outputs = D + 20 + 12 + N * 10, 20 + 20 + N * 24 + N * 26 + D  # two linears share the first input
    assert latent.put_off(tokens, tokens, tp=1, element=4) == 4 * tokens * (inputs + outputs)
    later = [whole(of).backward(even_load(tokens), Grad.INPUT).kept for of in (LATENT, LLM)]
    plain = 2 * D + (N + 2 + 2) * 8 + N * 8  # both streams, queries, keys and values, what was attended
    assert later[0] - later[1] == 2 * tokens * (inputs + outputs - plain)


def test_ranks_gather_what_latent_attention_compressed() -> None:
    tokens, tp = 4096, 2
    (part,) = llm_work(LATENT, 260, Layout(tp=tp), 2)
    sent = {
        name: sum(one.bytes * one.calls for one in work.collectives if one.kind == name)
        for work in (part.forward(even_load(tokens)),)
        for name in ("all_gather", "reduce_scatter")
    }
    half = tokens // tp * 2  # bytes of one number of the tokens of the other rank
    assert sent["all_gather"] == half * ((20 + 12 + 8) + D)  # in front of attention, and of feed-forward
    assert sent["reduce_scatter"] == half * 3 * D  # behind the embedding and both
    forward, both = part.forward(even_load(tokens)), part.backward(even_load(tokens), Grad.BOTH)
    halves = [part.backward(even_load(tokens), grad) for grad in (Grad.INPUT, Grad.WEIGHT)]
    total = sum(one.bytes * one.calls for work in halves for one in work.collectives)
    assert total == sum(one.bytes * one.calls for one in both.collectives)
    assert forward.flops == llm_work(LATENT, 260, Layout(), 2)[0].forward(even_load(tokens)).flops // tp


@pytest.mark.parametrize("moe", [MoEConfig(), MoEConfig(experts=4, topk=2, ffn=F, shared_ffn=F)])
def test_a_further_token_takes_a_layer_a_linear_and_the_output_again(moe: MoEConfig) -> None:
    one, more = (whole(replace(LLM, moe=moe, mtp=mtp)) for mtp in (0, 2))
    token, square = token_and_square(one)
    assert token_and_square(more) == (3 * token + 2 * 2 * 2 * D * D, 3 * square)
    targets = even_load(0, targets=T, routed=(0,) * one.ep)
    assert more.forward(targets).flops == 3 * one.forward(targets).flops == 3 * T * 2 * D * V
    layer = size(one) - 2 * V * D - D
    assert size(more) - size(one) == 2 * (layer + 2 * D * D + 3 * D)
    assert (one.layers, more.layers, more.ep) == (1, 3, one.ep)


def test_a_last_part_without_the_embedding_holds_a_copy_of_it() -> None:
    llm = replace(LLM, layers=4, mtp=1)
    first, last = llm_work(llm, 260, Layout(pp=2), 2)
    assert [weight.elements for part in (first, last) for weight in part.weights() if weight.tied] == [
        V * D
    ] * 2
    assert size(first) + size(last) == size(whole(llm)) + V * D
    reduced = [one for part in (first, last) for one in part.reduction({"embd": 2}) if one.axis == "embd"]
    assert len(reduced) == 2
    tied = llm_work(replace(llm, tied=True), 260, Layout(pp=2), 2)
    assert sum(map(size, tied)) == size(whole(replace(llm, tied=True))) + V * D  # its output is the copy


def test_sizes_that_do_not_fit_are_refused_by_key() -> None:
    for llm, words in (
        (replace(LLM, head_dim=7), r"head_dim=7: rotation takes pairs"),
        (replace(LLM, window=0), r"window=0: must be at least 1"),
        (
            replace(LLM, window=8, recompute="selective"),
            r"recompute=selective: with window=8: choose full, .* or none",
        ),
        (replace(LLM, attention=[]), r"attention=\[\]: give the kinds of some layers"),
        (replace(LLM, mtp=-1), r"mtp=-1"),
        (replace(LLM, mla=MLA), r"model.llm.kv_heads=2: with model.llm.mla: set mla.kv_rank=0, or this to 6"),
        (replace(LATENT, qk_norm=True), r"qk_norm=True: with model.llm.mla: .* this to false"),
        (replace(LATENT, mla=replace(MLA, kv_rank=0)), r"mla.kv_rank=0: latent attention needs it"),
        (replace(LATENT, mla=replace(MLA, rope_dim=7)), r"rope_dim=7"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_keys("model.llm", llm)
    with pytest.raises(ConfigError, match=r"encoder.full_layers=\[2\]"):
        check_keys("encoder", ViTConfig(layers=2, window=4, full_layers=[2]))
