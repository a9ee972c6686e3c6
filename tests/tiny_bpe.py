"""A small BPE with special tokens, as a folder that a published model might come with."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<image>")
WORDS = ["the answer is two and two is four", "hello there\n\nhow are you?", "  indented\n    code\n\n"]


def write_tokenizer(folder: Path, template: str = "", begins: bool = False) -> Path:
    """Train it; `begins` has it put <s> before each text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(WORDS * 40, trainer)
    bpe.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    if begins:
        first = [("<s>", bpe.token_to_id("<s>"))]
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=first)
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder
