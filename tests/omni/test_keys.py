"""Bounds and rules beside the keys of a configuration."""

import math
from dataclasses import dataclass, field, is_dataclass
from typing import ClassVar

import pytest

from omni import config, data_config, llm_config, optim_config
from omni.keys import ConfigError, Rule, Rules, at_least, check_keys, one_of


@dataclass
class Inner:
    share: float = at_least(0.5, 1.0)


@dataclass
class Outer:
    size: int | None = at_least(2, 4)
    rates: dict[str, float] = at_least(1.0, None)
    kind: str = one_of(("a", "b"), "a")
    inner: Inner = field(default_factory=Inner)
    many: dict[str, Inner] = field(default_factory=dict)
    listed: list[Inner] = field(default_factory=list)

    rules: ClassVar[Rules] = (
        Rule("inner.share", lambda own: own.size is None or own.inner.share < own.size, "below size={size}"),
    )


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"size": 1}, "part.size=1: must be at least 2"),
        ({"size": math.nan}, "part.size=nan: must be a finite number"),
        ({"rates": {"x": 1.0, "y": 0.5}}, "part.rates.y=0.5: must be at least 1"),
        ({"kind": "c"}, "part.kind=c: choose one of a, b"),
        ({"inner": Inner(0.1)}, "part.inner.share=0.1: must be at least 0.5"),
        ({"many": {"one": Inner(), "two": Inner(0)}}, "part.many.two.share=0"),
        ({"listed": [Inner(), Inner(0)]}, r"part.listed\[1\].share=0"),
        ({"inner": Inner(9)}, "part.inner.share=9: below size=4"),
    ],
)
def test_a_value_that_its_key_does_not_allow_is_refused(changes: dict, words: str) -> None:
    check_keys("part", Outer())
    check_keys("part", Outer(size=None, rates={}))
    with pytest.raises(ConfigError, match=words):
        check_keys("part", Outer(**changes))


def test_every_rule_of_the_configuration_names_keys_that_there_are() -> None:
    """A remedy is formatted with the keys of its section, only once it is needed."""
    named = vars(config) | vars(llm_config) | vars(data_config) | vars(optim_config)
    sections = [of for of in named.values() if is_dataclass(of) and getattr(of, "rules", ())]
    assert len(sections) >= 6
    for section in sections:
        keys = dict.fromkeys(section.__dataclass_fields__, 1)
        for rule in section.rules:
            assert rule.key.split(".")[0] in keys
            assert rule.remedy.format(**keys)
