"""`omni data build --recipe quickstart_chat`: a small published model that nobody has trained, and chats."""

from collections.abc import Callable, Mapping
from pathlib import Path

from omni.config import ConfigError

NUM_QUESTIONS = 20
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "dtype": "float32",
    # Those of <|endoftext|> and <|im_end|>: special tokens come first.
    "pad_token_id": 0,
    "eos_token_id": 2,
}


def build(out: Path, seed: int, overwrite: bool, tell: Callable[[str], None]) -> dict[Path, bool]:
    """Build `model`, a folder in the form of Qwen3, `train` and `heldout`, datasets of its chats, and their
    chats as JSONL, with some of those held out as questions. Return what was built now.

    Raises:
        DataError: for what is there already and is something else.
    """
    from dataloader.recipes.from_messages import build_from_messages
    from dataloader.recipes.quickstart_chat import draw_chats, lines, write_tokenizer
    from dataloader.tokenizer import get_tokenizer
    from omni.open_models.draw import draw_folder

    chats = dict(zip(("train", "heldout"), draw_chats(seed), strict=True))
    texts = {f"{name}.jsonl": lines(of, name) for name, of in chats.items()}
    texts["questions.jsonl"] = lines([chat[:-1] for chat in chats["heldout"][:NUM_QUESTIONS]], "heldout")
    write_texts(out, texts, overwrite)
    model = out / "model"
    built = {model: overwrite or not is_whole(model)}
    if built[model]:
        model.mkdir(exist_ok=True)
        vocab = write_tokenizer(model, (said["content"] for chat in chats["train"] for said in chat))
        draw_folder(model, {**CONFIG, "vocab_size": vocab}, seed)
    tokenizer = get_tokenizer({"name": "hf", "path": str(model)})
    for name in chats:
        built[out / name] = build_from_messages(
            out / f"{name}.jsonl", out / name, tokenizer, overwrite, tell=tell
        )
    return built


def write_texts(out: Path, texts: Mapping[str, str], overwrite: bool) -> None:
    """Write files of chats.

    Raises:
        DataError: for one that is there already with others.
    """
    from dataloader.format import DataError

    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        file = out / name
        if not overwrite and file.exists() and file.read_text(encoding="utf-8") != text:
            raise DataError(f"{file} holds other chats: choose another folder or overwrite it (--overwrite)")
        file.write_text(text, encoding="utf-8")


def is_whole(model: Path) -> bool:
    """Whether a folder holds a model, and none that a build left which was cut short."""
    from omni.open_models.folder import open_folder

    if not model.exists():
        return False
    try:
        open_folder(str(model)).check()
    except ConfigError:
        return False
    return True
