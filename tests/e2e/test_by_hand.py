"""Jobs of several nodes started by hand, as docs/launching.md says: an agent on every node."""

import socket
from contextlib import ExitStack

import pytest
from runs import TINY, Running, data_keys, omni, read_lines, strip, write

from parallel.handshake import SECRET, new_secret

pytestmark = pytest.mark.slow

AGENT = [
    "--nnodes=2",
    "--nproc-per-node=1",
    "--rdzv-backend=c10d",
    "--rdzv-id=17",
    "--local-addr=127.0.0.1",
]
ENV = {"PYTHONSAFEPATH": "1", SECRET: new_secret()}


def test_agents_on_every_node_trains_a_rendered_job(tmp_path):
    data = data_keys(write(tmp_path / "strips", [strip(i) for i in range(32)]))
    launcher = ["hydra/launcher=render", "hydra.launcher.ranks_per_node=1", "launch.ranks=2", "run.dir=run"]
    rendered = omni(["train", *TINY, *data, *launcher, "train.steps=2"], tmp_path)
    assert rendered.code == 0, rendered.err
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"--rdzv-endpoint=127.0.0.1:{probe.getsockname()[1]}"
    command = [
        "-m",
        "infra.agent",
        *AGENT,
        endpoint,
        "-m",
        "omni.training.worker",
        "run/config.yaml",
    ]
    with ExitStack() as ends:
        nodes = []
        for _ in range(2):
            nodes.append(Running(command, tmp_path, ENV))
            ends.callback(nodes[-1].end)
        done = [node.finish() for node in nodes]
    assert [each.code for each in done] == [0, 0], done[0].err + done[1].err
    assert [record["progress/step"] for record in read_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
