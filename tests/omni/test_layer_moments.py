"""What a layer's passes make and free, step by step: a backward ends with nothing but what it puts off."""

from dataclasses import replace
from random import Random

import pytest

from omni.models.expert_moments import Routed, expert_steps, products
from omni.models.expert_stack import ExpertStack
from omni.models.layer_moments import Learning, Weights, backward_steps, half_products
from omni.models.stack import Stack
from parallel.work import Attended, Load


def random_layer(rng: Random, recompute: str) -> Stack:
    tp, size = rng.choice((1, 2, 4)), rng.choice((32, 64))
    kv_heads = tp * rng.choice((1, 2))
    heads = kv_heads * rng.choice((1, 2, 3))
    return Stack(
        layers=1,
        hidden=heads * size,
        heads=heads,
        kv_heads=kv_heads,
        ffn=tp * 64 * rng.randint(1, 9),
        gated=rng.random() < 0.5,
        causal=True,
        bias=rng.random() < 0.5,
        qkv_bias=rng.random() < 0.5,
        norm=rng.choice(("RMSNorm", "LayerNorm")),
        recompute=recompute,
        tp=tp,
        qk_norm=rng.random() < 0.5,
        output_gate=rng.random() < 0.3,
        norms=rng.choice(("before", "before", "around", "after")),
        splits_tokens=rng.random() < 0.7,
        element=2,
    )


def random_load(rng: Random, tp: int, frozen: bool) -> Load:
    tokens = tp * rng.randint(1, 300)
    alone = Attended(tokens, tokens)
    sent = ((0, rng.randint(1, 9)), (0, 3), (0, 5), (0, 2))
    local = rng.choice((0, rng.randint(0, tokens)))
    shared = Attended(
        *(tokens, local, rng.randint(0, 500), rng.randint(1, 500), *sent),
        adding=(rng.randint(0, 50), rng.randint(0, 50), rng.randint(0, 50)),
        late=rng.randint(0, local),
    )
    return Load(rng.choice((alone, shared)), frozen=frozen)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("weights", list(Weights))
def test_a_backward_frees_what_the_forward_has_kept_but_what_it_puts_off(recompute, weights):
    rng = Random(0)
    for _ in range(200):
        layer = random_layer(rng, recompute)
        load = random_load(rng, layer.tp, weights is Weights.FROZEN)
        later = sum(product.gone for product in layer.products(load)) if weights is Weights.LATER else 0
        steps = sum(backward_steps(layer, load.seen, Learning(weights, {})))
        assert steps == later - layer.layer_kept(load)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("weights", list(Weights))
def test_so_it_is_with_experts(recompute, weights):
    rng = Random(0)
    for _ in range(200):
        dense = replace(random_layer(rng, recompute), bias=False, splits_tokens=True)
        ep = rng.choice((1, 2, 4))
        experts, width = ep * rng.randint(1, 3), 32 * rng.randint(1, 9)
        dense = replace(dense, ffn=dense.ffn * rng.randint(0, 1))
        layer = ExpertStack(dense, experts, rng.randint(1, experts), width, ep, rng.random() < 0.5)
        load = random_load(rng, dense.tp, weights is Weights.FROZEN)
        load = replace(load, routed=(load.tokens // dense.tp, *(rng.randint(1, 99) for _ in range(1, ep))))
        later = sum(product.gone for product in layer.products(load)) if weights is Weights.LATER else 0
        kept = layer.kept_by_router_and_experts(load)
        steps = sum(expert_steps(dense, load.seen, layer.rows(load), kept, weights))
        assert steps == later - layer.layer_kept(load)


def test_one_expert_puts_off_what_a_feed_forward_of_its_rows_does():
    rng = Random(2)
    for _ in range(50):
        layer = replace(random_layer(rng, "none"), tp=1)
        width, rows = 32 * rng.randint(1, 9), rng.randint(1, 99)
        alone = products(layer, Routed(rows, 4, width, 0, rows, 1))
        assert list(alone) == list(half_products(layer, layer.feed_forward_linears(width), rows))


def test_a_pass_that_keeps_nothing_ends_with_its_output():
    rng = Random(1)
    for _ in range(200):
        layer = random_layer(rng, "none")
        load = random_load(rng, layer.tp, rng.random() < 0.5)
        anew = replace(layer, recompute="full").made(load)
        assert anew.kept == layer.stream(load.tokens)
        assert anew.most <= layer.made(load).most
