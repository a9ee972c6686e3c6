"""What shows a process may go away: the process goes on, and its run folder says so once."""

import os
import subprocess
import sys

from infra.run_folder import RunFolder

PROGRAM = """
import sys
from pathlib import Path
from infra.run_folder import RunFolder
from infra.screen import keep_going_without
keep_going_without(RunFolder(Path(sys.argv[1])))
for number in range(5):
    print("line", number, flush=True)
    print("warning", number, file=sys.stderr, flush=True)
Path(sys.argv[1], "done").write_text("yes")
"""


def ends_well(folder, out):
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], stdout=out, stderr=out, check=False)
    assert (done.returncode, (folder / "done").read_text()) == (0, "yes")
    return (RunFolder(folder).errors / "screen.txt").read_text().splitlines()


def test_a_closed_pipe_ends_nothing(tmp_path):
    read, write = os.pipe()
    os.close(read)
    lines = ends_well(tmp_path, write)
    os.close(write)
    assert [name in line for name, line in zip(("<stdout>", "<stderr>"), lines, strict=True)] == [True, True]
    assert all("Broken pipe" in line for line in lines)


def test_a_full_disk_of_the_log_ends_nothing(tmp_path):
    with open("/dev/full", "w") as full:
        lines = ends_well(tmp_path, full)
    assert all("No space left" in line for line in lines)
