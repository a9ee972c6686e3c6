"""What pages say of policies is what policies are."""

import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from omegaconf import MISSING as UNSET
from omegaconf import OmegaConf

from omni.compose import compose_config, load_config
from omni.config import Config
from omni.planning.choice import POLICIES
from omni.policies import KINDS, Section
from parallel.policy import registered

ROOT = Path(__file__).parents[2]


def facts_of_page() -> dict[str, set[str]]:
    """The facts that docs/policies.md lists, by kind; a row without a kind is of the one above it."""
    page = (ROOT / "docs/policies.md").read_text()
    table = page.partition("Facts that a kind states")[2].partition("\n\n**Pure**")[0]
    found: dict[str, set[str]] = {}
    kind = ""
    for named, fact in re.findall(r"^\| (?:`(\w+)` )?\| `(\w+)` \|", table, re.MULTILINE):
        kind = named or kind
        found.setdefault(kind, set()).add(fact)
    return found


def test_the_page_lists_every_fact_of_every_kind() -> None:
    told = {"name", "decide", "key"}  # the key is noted when a configuration chooses the policy
    stated = {kind.__name__: {field.name for field in fields(kind)} - told for _, kind, _ in KINDS}
    assert facts_of_page() == {kind: facts for kind, facts in stated.items() if facts}


def test_every_fact_has_a_default() -> None:
    for _, kind, _ in KINDS:
        for field in fields(kind):
            if field.name not in ("name", "decide"):
                assert field.default is not MISSING or field.default_factory is not MISSING, field


def test_nothing_that_is_registered_stands_under_not_yet() -> None:
    table = (ROOT / "README.md").read_text().partition("| not yet |")[2]
    cells = [line.split("|")[3] for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(cells) > 10
    words = set(re.findall(r"\w+", " ".join(cells).lower()))
    names = {name for _, kind, _ in KINDS for name in registered(kind.group)} - {
        "joint",
        "all",
        "none",
        "direct",
    }
    assert names & words == set()


@pytest.mark.parametrize("section", KINDS, ids=lambda section: section.name)
def test_systems_alone_choose_policies(section: Section) -> None:
    """No second default stands behind the systems'."""
    assert getattr(Config(), section.name).policy == UNSET
    known = registered(section.kind.group)
    assert getattr(compose_config(["system=multiplexed"]), section.name).policy in known
    left = ["auto"] if f"{section.name}.policy" in POLICIES else []
    assert getattr(compose_config([]), section.name).policy in [*known, *left]


def test_a_run_saved_before_there_was_dealing_is_dealt_as_it_was(tmp_path: Path) -> None:
    saved = OmegaConf.structured(compose_config([]))
    old = OmegaConf.to_container(saved)
    assert isinstance(old, dict)
    del old["deal"]
    OmegaConf.save(OmegaConf.create(old), tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml").deal.policy == "by_length"
