"""Whole models: a text model with a tower in front of it, in one folder.

Of the tower a family says which encoder it is; its weights are read by the encoder's own rules. Those of the
text are the rules of a family of text, whose tensors have other names here:

    model.layers.0.…      model.language_model.layers.0.…       (as transformers 5 writes Qwen's)
    lm_head.weight        language_model.lm_head.weight         (InternVL)
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from omni.open_models.families import QWEN2, QWEN3, SKIPPED
from omni.open_models.family import Family, Rules, Said, family_of
from omni.open_models.rules import Rule

TOWER = {"image": {"name": "qwen_vit"}}
"""The encoder of Qwen's towers."""
Keys = Callable[[Said], dict[str, Any]]

_OF_TOWER = (
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    "vision_token_id",
)
"""Keys that say nothing of the text: what the tower is, and which tokens stand for items."""


def beside_tower(keys: Keys, said: Said, tied: bool = False) -> dict[str, Any]:
    """Keys of a model of text with a tower: those that `keys` takes of its text, which older files have at
    their top. `tied` is what it means to say nothing of that.
    """
    said.skip(*_OF_TOWER)
    if "text_config" not in said.values:
        return keys(said)
    said.skip(*SKIPPED)
    text = Said(said.take("text_config"), f"{said.path}: text_config")
    inner = text.take("tie_word_embeddings", False)
    outer = said.take("tie_word_embeddings", inner or tied)
    found = keys(text) | {"tied": outer or inner}
    text.end()
    return found


def _in_sections(keys: Keys, interleaved: bool) -> Keys:
    """Keys of a text whose positions are in time, height and width, which share a head's frequencies."""

    def taken(said: Said) -> dict[str, Any]:
        told = {**said.take("rope_parameters", {}), **said.take("rope_scaling", {})}
        sections, in_turn = told.pop("mrope_section", None), told.pop("mrope_interleaved", interleaved)
        if not sections or in_turn != interleaved:
            why = f"frequencies are in sections{', in turn' if interleaved else ', one after the other'}"
            raise said.refused("rope_parameters", {"mrope_section": sections, **told}, why)
        for kind in {"type", "rope_type"} & {key for key, value in told.items() if value == "mrope"}:
            told[kind] = "default"
        said.values["rope_parameters"] = told
        return keys(said) | {"rotary.sections": list(sections), "rotary.interleaved": interleaved}

    return taken


def _qwen3_vl(said: Said) -> dict[str, Any]:
    return beside_tower(_in_sections(QWEN3.keys, interleaved=True), said)


def _qwen2_5_vl(said: Said) -> dict[str, Any]:
    return beside_tower(_in_sections(QWEN2.keys, interleaved=False), said)


def _internvl(said: Said) -> dict[str, Any]:
    """Its text may be of any family whose rules are those of Qwen2."""
    said.skip("downsample_ratio", "image_seq_length", "projector_hidden_act")
    said.must("vision_feature_layer", -1)
    said.must("vision_feature_select_strategy", "default")
    of_text = family_of(said.values.get("text_config") or {}, f"{said.path}: text_config")
    if of_text.rules is not QWEN2.rules:
        raise said.refused("text_config", said.values["text_config"].get("model_type"), "it has other layers")
    return beside_tower(of_text.keys, said, tied=True)


def under(rules: Rules, model: str, head: str) -> Rules:
    """The rules of a text model, whose `model.` and `lm_head` are called `model` and `head` in a folder."""

    def named(name: str) -> str:
        stem, _, rest = name.partition(".")
        return f"{ {'model': model, 'lm_head': head}[stem] }.{rest}"

    def of(keys: Mapping[str, Any]) -> tuple[Rule, ...]:
        return tuple(replace(rule, theirs=tuple(map(named, rule.theirs))) for rule in rules(keys))

    return of


def _qwen(keys: Keys, text: Family) -> Family:
    return Family(
        keys,
        under(text.rules, "model.language_model", "lm_head"),
        copied=("model.visual.*", "visual.*"),
        otherwise=(text.rules,),
        encoders=TOWER,
    )


QWEN3_VL = _qwen(_qwen3_vl, QWEN3)
QWEN2_5_VL = _qwen(_qwen2_5_vl, QWEN2)
_PARTS = ("vision_tower.*", "multi_modal_projector.*")
INTERNVL = Family(
    _internvl,
    under(QWEN2.rules, "language_model.model", "language_model.lm_head"),
    copied=(*_PARTS, *(f"model.{part}" for part in _PARTS)),
    otherwise=(under(QWEN2.rules, "model.language_model", "lm_head"),),
    encoders={"image": {"name": "batch_tower", "connector": True}},
)
