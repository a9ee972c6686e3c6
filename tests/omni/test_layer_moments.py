"""What a layer's passes make and free, step by step: a backward ends with nothing but what it puts off."""

from dataclasses import replace
from random import Random

import pytest

from omni.models.layer_moments import Learning, Weights, backward_steps
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
        splits_tokens=rng.random() < 0.7,
        element=2,
    )


def random_load(rng: Random, tp: int, frozen: bool) -> Load:
    tokens = tp * rng.randint(1, 300)
    alone = Attended(tokens, tokens)
    sent = ((0, rng.randint(1, 9)), (0, 3), (0, 5), (0, 2))
    shared = Attended(tokens, rng.randint(0, tokens), rng.randint(0, 500), rng.randint(1, 500), *sent)
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


def test_a_pass_that_keeps_nothing_ends_with_its_output():
    rng = Random(1)
    for _ in range(200):
        layer = random_layer(rng, "none")
        load = random_load(rng, layer.tp, rng.random() < 0.5)
        alone = layer.made(load, graph=False)
        assert alone.now == layer.stream(load.tokens) == layer_kept_anew(layer, load)
        assert alone.most <= layer.made(load).most


def layer_kept_anew(layer: Stack, load: Load) -> int:
    return replace(layer, recompute="full").layer_kept(load)
