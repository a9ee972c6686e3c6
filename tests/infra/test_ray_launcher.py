"""What a job asks of Ray, what its agents are told and how it ended. Real Ray: tests/e2e/test_ray.py."""

import signal
import socket
import sys
from pathlib import Path

import pytest

from infra.launchers.job import Job
from infra.launchers.ray_cluster import RayError, check_installed, no_room, on_cluster
from infra.launchers.ray_jobs import job_code
from infra.launchers.ray_nodes import RayNeeds, environment, node_command, output_of

JOB = Job(3, "mine-3", Path("/fs/my runs/3"), 2, 8, 1, env={"NCCL_DEBUG": "INFO"})


@pytest.mark.parametrize(
    ("codes", "received", "code"),
    [
        ([0, 0], [], 0),
        ([0, 0], [signal.SIGTERM], 0),
        ([137, 1], [], 137),
        ([1, 137], [], 1),
        ([0, 143, 143], [signal.SIGINT], 130),
        ([1, 2], [signal.SIGINT], 2),
    ],
)
def test_a_jobs_code_is_that_of_the_agent_that_failed_first_but_for_mistakes_and_stops(codes, received, code):
    assert job_code(codes, received) == code


def test_a_node_asks_for_what_its_ranks_take():
    assert RayNeeds("python", True, 2, 60, True).bundle(JOB) == {"CPU": 16.0, "GPU": 8.0}
    assert RayNeeds("python", False, 1, 60, True).bundle(JOB) == {"CPU": 8.0}


def test_who_finds_no_room_reads_what_is_asked_and_what_there_is():
    nodes = [{"CPU": 4.0, "memory": 1e9}, {"CPU": 16.0, "GPU": 4.0}, {"CPU": 4.0}, {}]
    assert no_room(JOB, {"CPU": 16.0, "GPU": 8.0}, nodes) == (
        "it asks for 2 × CPU 16, GPU 8, each on a node of its own; nodes there are: 1 × CPU 0, GPU 0; "
        "1 × CPU 16, GPU 4; 2 × CPU 4, GPU 0"
    )
    assert no_room(JOB, {"CPU": 16.0}, []).endswith("nodes there are: none")


def test_agents_are_told_where_to_meet_and_keep_the_environment_of_the_launcher():
    command = node_command(JOB, "/opt/python", 1, ("10.0.0.1", 2950), "17")
    assert command[:3] == ["/opt/python", "-m", "infra.launchers.node"]
    told = dict(zip(command[3:-1:2], command[4:-1:2], strict=True))
    assert (told["--head"], told["--port"], told["--node"], told["--nodes"]) == ("10.0.0.1", "2950", "1", "2")
    assert (told["--ranks"], told["--launch"], told["--max-restarts"]) == ("8", "17", "1")
    assert command[-1] == "/fs/my runs/3/config.yaml"
    ours = {"PATH": "/bin", "RAY_ADDRESS": "10.0.0.1:6379", "NCCL_DEBUG": "WARN"}
    own = environment(JOB, ours, 2)
    assert own == {"PATH": "/bin", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2", "PYTHONSAFEPATH": "1"}
    assert [output_of(JOB, node).name for node in (0, 1)] == ["output.log", "output.1.log"]


def test_ray_that_is_not_installed_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RayError, match=r"not installed here: pip install 'omni-train\[ray\]'"):
        check_installed()


def test_a_cluster_that_does_not_answer_is_named_before_ray_is_asked():
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            RayError, match=rf"hydra\.launcher\.address={address}: no Ray cluster answers: .*refused"
        ):
            on_cluster(address).__enter__()
    with pytest.raises(RayError, match="it is no HOST:PORT"):
        on_cluster("ray://nowhere").__enter__()
