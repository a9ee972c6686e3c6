"""`omni data build --recipe quickstart_open`: an untrained small Qwen3-VL, and chats with pictures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_TRAIN, NUM_QUESTIONS = 8_000, 20
_DEVIATION = 0.08  # of matrices that are drawn
TEXT = {
    **{"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024},
    "initializer_range": _DEVIATION,
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 100.0},
        **{"mrope_section": [8, 4, 4], "mrope_interleaved": True},
    },
}
# A digit of 8 x 8 pixels is 2 x 2 patches, which become a row.
TOWER = {
    **{"depth": 3, "hidden_size": 64, "num_heads": 4, "intermediate_size": 192, "out_hidden_size": 128},
    **{"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64},
    **{"deepstack_visual_indexes": [0, 1], "initializer_range": _DEVIATION},
}
LIMITS = {"shortest_edge": 64, "longest_edge": 4096}  # pixels of a picture


def build(out: Path, seed: int, overwrite: bool, tell: Callable[[str], None]) -> dict[Path, bool]:
    """Build `model`, a folder in the form of Qwen3-VL, `train` and `heldout`, datasets of chats about strips,
    and these as JSONL beside their pictures, with some of those held out as questions. Return what was built
    now.

    Raises:
        DataError: for what is there already and is something else.
    """
    from dataloader.recipes.from_messages import build_from_messages
    from dataloader.recipes.quickstart import draw_strips
    from dataloader.recipes.quickstart_chat import lines, write_tokenizer
    from dataloader.recipes.quickstart_open import PICTURES, SPECIAL, TEMPLATE, chats_of
    from dataloader.tokenizer import get_tokenizer
    from omni.commands._quickstart_chat import is_whole, write_texts

    strips = dict(zip(("train", "heldout"), draw_strips(seed), strict=True))
    strips["train"] = strips["train"][:NUM_TRAIN]
    chats = {name: chats_of(of) for name, of in strips.items()}
    texts = {f"{name}.jsonl": lines(of, name) for name, of in chats.items()}
    texts["questions.jsonl"] = lines([chat[:-1] for chat in chats["heldout"][:NUM_QUESTIONS]], "heldout")
    write_texts(out, texts, overwrite)
    (out / PICTURES).mkdir(exist_ok=True)
    for strip in (*strips["train"], *strips["heldout"]):
        file, data = out / PICTURES / f"{strip.id}.png", strip.items[0].data
        if not file.exists() or file.read_bytes() != data:
            file.write_bytes(data)
    model = out / "model"
    built = {model: overwrite or not is_whole(model)}
    if built[model]:
        tell(f"drawing {model} ...")
        model.mkdir(exist_ok=True)
        said = (
            part for chat in chats["train"] for part in (chat[0]["content"][1]["text"], chat[1]["content"])
        )
        vocab = write_tokenizer(model, said, SPECIAL, TEMPLATE)
        _draw(model, vocab, {text: number for number, text in enumerate(SPECIAL)}, seed)
    tokenizer = get_tokenizer({"name": "hf", "path": str(model)})
    for name in chats:
        built[out / name] = build_from_messages(
            out / f"{name}.jsonl", out / name, tokenizer, overwrite, tell=tell
        )
    return built


def _draw(folder: Path, vocab: int, ids: dict[str, int], seed: int) -> None:
    """Write a Qwen3-VL of random weights, as transformers draws and saves it, with its processor.

    Raises:
        ValueError: if transformers is not there.
    """
    try:
        import torch
        from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
        from transformers.utils import logging
    except ImportError as error:
        raise ValueError(
            f"the recipe needs the package transformers ({error}): pip install 'omni-train[open]'"
        ) from error
    end, closing = (ids[text] for text in ("<|endoftext|>", "<|im_end|>"))
    tokens: dict[str, Any] = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    text = {**TEXT, "vocab_size": vocab, "pad_token_id": end, "eos_token_id": closing}
    config = Qwen3VLConfig(text_config=text, vision_config=TOWER, tie_word_embeddings=True, **tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
    logging.disable_progress_bar()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = closing, end
    model.save_pretrained(folder)
    pixels = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=LIMITS)
    pixels.save_pretrained(folder)
