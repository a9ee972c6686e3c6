"""What happens to runs from outside: a second one in their folder, a rank that stands still for a while."""

import os
import signal
import time

import pytest
from runs import TINY, Running, data_keys, omni, steps, strip, write

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    data = data_keys(write(tmp_path_factory.mktemp("data") / "strips", [strip(i) for i in range(32)]))
    return ["train", *TINY, *data, "launch.ranks=2", "run.dir=run", "health.report_hang_s=3"]


def test_a_second_run_in_a_folder_is_refused_and_a_rank_that_stands_still_is_named(keys, tmp_path):
    running = Running(["-m", "omni", *keys, "train.steps=150"], tmp_path)
    running.wait_until(lambda: len(steps(tmp_path / "run")) >= 3, "step")
    rank = next(process for process in running.descendants() if process.name() == "omni-rank-1")
    os.kill(rank.pid, signal.SIGSTOP)
    before = len(steps(tmp_path / "run"))
    second = omni([*keys, "train.steps=2"], tmp_path)
    assert second.code == 2
    assert "Traceback" not in second.err
    assert f"process {running.process.pid}, since" in second.err, second.err
    running.wait_until(lambda: "no progress for 3 s" in running.texts()[1], "report", 20)
    time.sleep(2)
    assert len(steps(tmp_path / "run")) <= before + 1, "the others wait for it"
    os.kill(rank.pid, signal.SIGCONT)
    done = running.finish()
    assert done.code == 0, done.err
    assert steps(tmp_path / "run") == list(range(1, 151)), "nothing is lost"
