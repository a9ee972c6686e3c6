"""Chats about the quickstart's strips of digits, in the form of a model with a vision tower.

user       <picture of a strip>Read the digits.
assistant  three one four
"""

from collections.abc import Sequence
from typing import Any

from dataloader.format import PLACEHOLDER, Sample
from dataloader.recipes.quickstart_chat import SPECIAL as OF_TURNS

PICTURES = "pictures"
ASKED = "Read the digits."
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
SPECIAL = (*OF_TURNS, "<|vision_start|>", "<|vision_end|>", IMAGE, VIDEO)
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def chats_of(strips: Sequence[Sample]) -> list[list[dict[str, Any]]]:
    """A chat for each strip, whose picture lies in `PICTURES` under the strip's name."""
    return [
        [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": f"{PICTURES}/{strip.id}.png"},
                    {"type": "text", "text": ASKED},
                ],
            },
            {"role": "assistant", "content": strip.text.removeprefix(PLACEHOLDER)},
        ]
        for strip in strips
    ]
