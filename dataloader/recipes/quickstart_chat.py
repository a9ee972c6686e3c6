"""Chats of the second quickstart, drawn here, and a tokenizer trained on them: needs no download.

Somebody begins with a number and changes it from turn to turn. A model must take the last result out of its
own last answer, and add or subtract what it is asked to.

    user       Begin with 7. Add 5.
    assistant  Now 7 plus 5 is 12.
    user       Take away 3.
    assistant  Now 12 minus 3 is 9.

A number stands after a space wherever it stands, so that it is one token. What is held out are other
sequences of the same sums.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Chat = list[dict[str, str]]

NUM_TRAIN = 8_000
NUM_HELDOUT = 400
VOCAB = 512

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
_MOST = 30  # of a result
_STEP = 9
_TURNS = (1, 2, 3, 4)


def draw_chats(seed: int) -> tuple[list[Chat], list[Chat]]:
    """Chats to train on and chats held out, none of which is among the others, from the seed alone."""
    rng = np.random.Generator(np.random.Philox(seed))
    seen: dict[str, Chat] = {}
    while len(seen) < NUM_TRAIN + NUM_HELDOUT:
        chat = _chat(rng)
        seen.setdefault(json.dumps(chat), chat)
    chats = list(seen.values())
    return chats[NUM_HELDOUT:], chats[:NUM_HELDOUT]


def _chat(rng: np.random.Generator) -> Chat:
    value = int(rng.integers(1, _MOST))
    begun, chat = f"Begin with {value}. ", []
    for _ in range(rng.choice(_TURNS)):
        low, high = max(-_STEP, -value), min(_STEP, _MOST - value)
        change = int(rng.choice([step for step in range(low, high + 1) if step]))
        asked, word = ("Add", "plus") if change > 0 else ("Take away", "minus")
        answer = f"Now {value} {word} {abs(change)} is {value + change}."
        chat.append({"role": "user", "content": f"{begun}{asked} {abs(change)}."})
        chat.append({"role": "assistant", "content": answer})
        value, begun = value + change, ""
    return chat


def lines(chats: Sequence[Sequence[Any]], name: str) -> str:
    """Chats as `omni data build --from-messages` and `omni generate --messages` read them."""
    each = ({"id": f"{name}-{number:05d}", "messages": chat} for number, chat in enumerate(chats))
    return "".join(json.dumps(line) + "\n" for line in each)


def write_tokenizer(
    folder: Path, texts: Iterable[str], special: Sequence[str] = SPECIAL, template: str = TEMPLATE
) -> int:
    """Train a BPE on texts, write it with a chat template as the files that published models have, and return
    how many ids it has. Of the special tokens, which come first, the third closes a turn.

    Raises:
        ValueError: if the package tokenizers is not there.
    """
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ValueError(
            f"the recipe needs the package tokenizers ({error}): pip install 'omni-train[open]'"
        ) from error
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.save(str(folder / "tokenizer.json"))
    end, _, closing, *_ = special
    said: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": closing,
        "pad_token": end,
        "model_max_length": 1024,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(said, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return bpe.get_vocab_size(with_added_tokens=True)
