"""The default without one of the things that it does: what does each of them bring?

What else is open is chosen anew without it, so a row is the best that is left.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from omni.config import Config
from omni.planning.choice import BALANCE, ENCODER_SP, LLM_SP, PAIRING, POLICIES, SCHEDULE, with_keys
from parallel.placements import DISAGGREGATED

ABLATED = "omni"
KEYS: Mapping[str, Mapping[str, Any]] = {
    "without multiplexing": {"placement.policy": DISAGGREGATED.name},  # encoders on ranks of their own
    "without sharing": {key: POLICIES[key][0] for key in (LLM_SP, ENCODER_SP)},  # items stay whole
    "without balancing": {
        "deal.policy": "by_length",
        BALANCE: "none",
        PAIRING: "in_order",
    },  # samples in turn
    "without splitting": {SCHEDULE: "joint"},  # backwards in one piece
    "without joint schedule": {SCHEDULE: "zero_bubble_h1"},  # encoders before and after the LLM's passes
}
_WITH_VPP = {"without joint schedule": {SCHEDULE: "interleaved"}}


def without_each(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield the default without each thing that it does, by name. With one stage nothing is split or joint,
    and with several virtual stages on a rank nothing is split.
    """
    layout = config.layout.llm
    for name, keys in KEYS.items():
        if SCHEDULE in keys and (layout.vpp or 1) > 1:
            keys = _WITH_VPP.get(name, {})
        if keys and (SCHEDULE not in keys or layout.pp > 1):
            yield name, with_keys(config, keys)
