"""Folders of agents that were killed go; those of others stay."""

import subprocess
import sys
import tempfile

import pytest

from infra.agent_folder import PREFIX, agent_folder, remove_unused

KILLED = """
import os, signal
from pathlib import Path
from infra.agent_folder import agent_folder
with agent_folder() as folder:
    (Path(folder) / "logs").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder for temporary files, of this process and of those that it starts."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_the_folder_of_a_killed_agent_is_removed_and_no_other(here):
    subprocess.run([sys.executable, "-c", KILLED], check=False)
    (killed,) = here.iterdir()
    assert (killed / "logs").is_dir()
    anothers = [here / f"{PREFIX}without-a-lock", here / "other"]
    for folder in anothers:
        folder.mkdir()
    elsewhere = here / "other" / "used"
    elsewhere.touch()
    link = here / f"{PREFIX}link"
    link.symlink_to(here / "other")
    with agent_folder() as used:
        remove_unused()
        assert {str(path) for path in here.iterdir()} == {*map(str, anothers), str(link), used}
    assert elsewhere.exists()
    assert set(here.iterdir()) == {*anothers, link}
