"""A kind of policy that the platform does not have, added as docs/policies.md says: a line in two files."""

import json
import os
import subprocess
import sys
from pathlib import Path

from packages import write_package

ROOT = Path(__file__).parents[2]
LINES = {
    "policies.py": (
        ("from typing import NamedTuple\n", "from routing import RoutingPolicy\n"),
        ("KINDS = (\n", '    Section("routing", RoutingPolicy, ("domain.homes",)),\n'),
    ),
    "config.py": (
        (
            "    pairing: PolicyConfig = field(default_factory=PolicyConfig)\n",
            '    routing: PolicyConfig = field(default_factory=lambda: PolicyConfig("plain"))\n',
        ),
    ),
}
MODULE = """
from dataclasses import dataclass
from typing import ClassVar
from parallel.policy import Policy

@dataclass(frozen=True)
class RoutingPolicy(Policy):
    group: ClassVar[str] = "omni.routing"
    def __call__(self, number):
        return self.decide(number)

PLAIN = RoutingPolicy("plain", lambda number: number)
TWICE = RoutingPolicy("twice", lambda number: 2 * number)
"""
USE = """
import json
import sys
from pathlib import Path
from omegaconf import OmegaConf
from omni.compose import compose_config, load_config
from omni.planning.choices import chosen_policies

NAMED = ["system=multiplexed"]
configs = [compose_config([*NAMED, *more]) for more in ([], ["routing.policy=twice"])]
plain, twice = (chosen_policies(config.policies) for config in configs)
old = OmegaConf.to_container(OmegaConf.structured(configs[0]))
del old["routing"]
OmegaConf.save(OmegaConf.create(old), "old.yaml")
try:
    chosen_policies(compose_config([*NAMED, "routing.policy=nope"]).policies)
except ValueError as error:
    refused = str(error)
print(json.dumps({
    "asked": [plain["routing"](3), twice["routing"](3)],
    "printed": twice.describe(),
    "behind": twice.behind("plan.domain.homes[0]: 1 or 2"),
    "saved": load_config(Path("old.yaml")).routing.policy,
    "refused": refused,
}))
"""


def copy_with(lines: dict[str, tuple[tuple[str, str], ...]], folder: Path) -> None:
    """The package `omni`, by links, but for the files to which lines are added."""
    folder.mkdir()
    for path in (ROOT / "omni").iterdir():
        if path.name not in lines:
            (folder / path.name).symlink_to(path)
    for name, added in lines.items():
        text = (ROOT / "omni" / name).read_text()
        for before, line in added:
            assert text.count(before) == 1, before
            text = text.replace(before, before + line)
        (folder / name).write_text(text)


def test_a_kind_is_a_class_and_a_line_in_each_of_two_files(tmp_path: Path) -> None:
    copy_with(LINES, tmp_path / "omni")
    points = {"omni.routing": "plain = routing:PLAIN\ntwice = routing:TWICE"}
    package = write_package(tmp_path / "package", "routing", MODULE, points)
    path = os.pathsep.join(map(str, (tmp_path, package, ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", USE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["asked"] == [3, 6]
    assert "routing=twice" in found["printed"]
    assert found["behind"] == ["routing=twice", "placement=colocated"]
    assert found["saved"] == "plain"
    assert "plain" in found["refused"]
    assert "entry point omni.routing" in found["refused"]
