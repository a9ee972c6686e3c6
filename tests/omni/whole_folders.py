"""Tiny random models of transformers with towers, whole, in folders: the referee of whole models."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from open_model_folders import DELTA, transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tower_folders import ALL

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
)
WORDS = "the picture shows two small squares and one large circle, user assistant what is there?"
TURN = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type == 'image' %}IMAGE{% elif part.type == 'text' %}{{ part.text }}{% endif -%}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
_TEXT = {
    **{"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 0.02, "initializer_range": 0.1},
    "max_position_embeddings": 512,
}
_ROPE = {"rope_type": "default", "rope_theta": 30.0}


def _qwen3_vl(tower: Any, ids: dict[str, int]) -> Any:
    rope = {**_ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    return transformers.Qwen3VLConfig(
        text_config={**_TEXT, "head_dim": 16, "rope_parameters": rope}, vision_config=tower, **_of_qwen(ids)
    )


def _qwen3_5(tower: Any, ids: dict[str, int]) -> Any:
    own = {key: value for key, value in DELTA.items() if key != "rope_parameters"}
    rope = {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    return transformers.Qwen3_5Config(
        text_config={**_TEXT, **own, "rope_parameters": rope}, vision_config=tower, **_of_qwen(ids)
    )


def _qwen2_5_vl(tower: Any, ids: dict[str, int]) -> Any:
    rope = {**_ROPE, "mrope_section": [4, 2, 2]}
    return transformers.Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": rope}, vision_config=tower, **_of_qwen(ids)
    )


def _of_qwen(ids: dict[str, int]) -> dict[str, int]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _internvl(tower: Any, ids: dict[str, int]) -> Any:
    return transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **_TEXT, "rope_parameters": _ROPE},
        vision_config=tower,
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=4,
        tie_word_embeddings=False,
    )


WHOLE = {
    "Qwen3-VL": ("Qwen3-VL", _qwen3_vl, "<|vision_start|><|image_pad|><|vision_end|>"),
    "Qwen2.5-VL": ("Qwen2.5-VL", _qwen2_5_vl, "<|vision_start|><|image_pad|><|vision_end|>"),
    "Qwen3.5": ("Qwen3.5 ours", _qwen3_5, "<|vision_start|><|image_pad|><|vision_end|>"),
    "InternVL": ("InternViT", _internvl, "<IMG_CONTEXT>\n"),
}


def write_tokenizer(folder: Path, mark: str) -> dict[str, int]:
    """Train a BPE, write it with a template, and return the ids of its special tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([WORDS] * 20, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": SPECIAL[0]}
    if mark.startswith("<IMG"):
        own = {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
        }
        said["extra_special_tokens"] = own | {"video_token": "<video>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    (folder / "chat_template.jinja").write_text(TURN.replace("IMAGE", mark))
    return {text: bpe.token_to_id(text) for text in SPECIAL}


def make_whole(name: str, folder: Path) -> torch.nn.Module:
    """Draw a whole model, save it with tokenizer, template and processor, and return it."""
    tower, config, mark = WHOLE[name]
    ids = write_tokenizer(folder, mark)
    _, of_tower, processor = ALL[tower][0](_TEXT["hidden_size"])
    torch.manual_seed(0)
    model: torch.nn.Module = transformers.AutoModelForImageTextToText.from_config(
        config(of_tower, ids), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for own, parameter in model.named_parameters():
            if own.endswith("dt_bias"):
                parameter.sub_(4)  # decays as models have them
    model.save_pretrained(folder, max_shard_size="200KB")
    processor.save_pretrained(folder)
    return model.eval()


CHATS = (
    ((), "what is there?", "one circle"),
    (((40, 60), (32, 32)), "what is there?", "two small squares"),
    (((61, 23),), "is there a picture?", "the picture shows one"),
    (((24, 24), (16, 72), (40, 16)), "is one large?", "one is large and two small"),
)
"""Sizes of the pictures of a chat, with a text behind each, what is asked and what is said."""


def chats(folder: Path) -> list[list[dict[str, Any]]]:
    """Write pictures, and chats with them to chats.jsonl. Return these, with pictures by their path."""
    draw, found = np.random.default_rng(0), []
    folder.mkdir(parents=True, exist_ok=True)
    for number, (sizes, asked, said) in enumerate(CHATS):
        parts: list[dict[str, str]] = []
        for item, size in enumerate(sizes):
            path = folder / f"{number}-{item}.png"
            Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)
            parts += [{"type": "image", "image": path.name}, {"type": "text", "text": f"picture {item}. "}]
        content: Any = [*parts, {"type": "text", "text": asked}] if parts else asked
        found.append([{"role": "user", "content": content}, {"role": "assistant", "content": said}])
    lines = (json.dumps({"messages": chat}) + "\n" for chat in found)
    (folder / "chats.jsonl").write_text("".join(lines))
    return found


_PROCESSORS = {
    "Qwen3-VL": "Qwen3VLProcessor",
    "Qwen3.5": "Qwen3VLProcessor",
    "Qwen2.5-VL": "Qwen2_5_VLProcessor",
    "InternVL": "InternVLProcessor",
}


def processor_of(name: str, folder: Path) -> Any:
    """transformers' processor of a folder, without that of videos, which asks for torchvision."""
    kind = getattr(transformers, _PROCESSORS[name])
    without = type(
        kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, own: type(own)}
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    more = {"image_seq_length": 4} if name == "InternVL" else {}
    template = tokenizer.chat_template
    return without(images, tokenizer, None, chat_template=template, **more)


def batch_of(
    processor: Any, chat: Sequence[dict[str, Any]], folder: Path, asks: bool = False
) -> dict[str, Any]:
    """What transformers makes of a chat whose pictures lie in `folder`."""
    text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=asks)
    parts = [part for message in chat if isinstance(message["content"], list) for part in message["content"]]
    images = [Image.open(folder / part["image"]).convert("RGB") for part in parts if part["type"] == "image"]
    return dict(processor(images=images or None, text=[text], return_tensors="pt"))
