"""What a rank's memory is made of, in words, and which keys would make it less."""

from collections.abc import Mapping
from dataclasses import fields

from omni.models.llm import NAME as LLM
from omni.models.llm_statement import VirtualStage
from omni.planning.memory import BETWEEN, by_kind
from omni.planning.run_spec import RunSpec
from parallel.layout import MOST_ZERO
from parallel.work import FP32

GIB = 1 << 30
STATE = ("weights", "gradients", "optimizer")
PASSES = ("activations", "workspace")
Parts = Mapping[tuple[str, str], int]


def by_component(parts: Parts, *kinds: str) -> dict[str, int]:
    """Add up the bytes of some kinds by component, the most first; those of no component are left out."""
    total: dict[str, int] = {}
    for (kind, component), size in parts.items():
        if kind in kinds and component != BETWEEN and size:
            total[component] = total.get(component, 0) + size
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


def made_of(parts: Parts) -> str:
    """Say how many GiB there are of each kind, the most first, and whose the activations are."""
    by_size = sorted(by_kind(parts).items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {size / GIB:.1f}{whose(parts, kind)}" for kind, size in by_size)


def whose(parts: Parts, kind: str) -> str:
    """Say how the activations divide among components, such as " (image 9.1, llm 2.2)"; else nothing."""
    of = by_component(parts, kind)
    if kind != "activations" or not of:
        return ""
    return f" ({', '.join(f'{name} {size / GIB:.1f}' for name, size in of.items())})"


def remedy(spec: RunSpec, parts: Parts, most: int) -> str:
    """Say what to change so that no more than `most` bytes are held: what a component keeps for each
    parameter, if that is more than half, else what passes of a component keep. Of another component, too,
    where the first alone could not make up for the rest.
    """
    whole = sum(parts.values())
    state = by_component(parts, *STATE)
    if 2 * sum(state.values()) > whole:
        fullest = next(iter(state))
        return _less_state(spec, fullest, 4 * parts.get(("optimizer", fullest), 0) > state[fullest])
    said, left = [], whole
    for name, size in by_component(parts, *PASSES).items():
        said.append(_less_of_llm(spec) if name == LLM else _less_of_encoder(spec, name))
        left -= size
        if left <= most:
            break
    return " ".join(said)


def _less_state(spec: RunSpec, component: str, of_optimizer: bool) -> str:
    """The remedy where what is kept for each parameter of a component fills memory, much of it for AdamW if
    it is `of_optimizer`.
    """
    sizes, ranks, dp = spec.config.layout.llm, spec.arrangement.world, spec.arrangement.llm.dp
    moments = ", or set optim.moments_dtype=bf16" if of_optimizer and spec.of_moments == FP32 else ""
    if component == LLM:
        stage = spec.arrangement.llm.zero
        zero = f"layout.llm.zero={stage}, " if stage < MOST_ZERO and dp > 1 else ""
        return f"Raise {zero}layout.llm.tp={sizes.tp} or pp={sizes.pp}, or launch.ranks={ranks}{moments}."
    tp = spec.arrangement.encoder_tp[component]
    return f"Raise layout.encoders.{component}.tp={tp}, or launch.ranks={ranks}{moments}."


def _less_of_llm(spec: RunSpec) -> str:
    """The remedy where passes of the LLM do."""
    sizes, model = spec.config.layout.llm, spec.config.model.llm
    recompute = "" if model.recompute == "full" else f"set model.llm.recompute=full (now {model.recompute}), "
    most = _most_offloaded(spec)
    if model.keep_attention:
        recompute += "set model.llm.keep_attention=false, "
    elif not recompute and model.offload < most:
        recompute = f"set model.llm.offload={most} (now {model.offload}), "
    return (
        f"For the LLM lower data.microbatch_tokens={spec.config.data.microbatch_tokens}, {recompute}"
        f"or raise layout.llm.cp={sizes.cp} or tp={sizes.tp}."
    )


def _most_offloaded(spec: RunSpec) -> int:
    """How many layers of each virtual stage may have their inputs on the host."""
    of_llm = (part for part in spec.work.values() if isinstance(part, VirtualStage))
    least = min(sum(stack.layers for stack in own.stacks) for own in of_llm)
    return least - 1 if spec.cluster.host_per_s is not None else 0


def _less_of_encoder(spec: RunSpec, name: str) -> str:
    """The remedy where passes of an encoder do: how many items a rank holds at once follows from the step."""
    data = spec.config.data
    key, step = (
        ("step_tokens", data.step_tokens)
        if data.step_tokens is not None
        else ("step_samples", data.step_samples)
    )
    now = _recompute(spec, name)
    recompute = f"set model.encoders.{name}.recompute=full (now {now}), " if now not in (None, "full") else ""
    if spec.config.model.encoders[name].get("keep_attention"):
        recompute = f"set model.encoders.{name}.keep_attention=false, "
    return (
        f"For {name} {recompute}raise layout.encoders.{name}.tp={spec.arrangement.encoder_tp[name]}, or have "
        f"a rank encode fewer items: lower data.{key}={step} or raise launch.ranks={spec.arrangement.world}."
    )


def _recompute(spec: RunSpec, name: str) -> str | None:
    """What an encoder recomputes, None if it has no such key."""
    defaults = {field.name: field.default for field in fields(spec.encoders[name].Config)}
    if "recompute" not in defaults:
        return None
    return str(spec.config.model.encoders[name].get("recompute", defaults["recompute"]))
