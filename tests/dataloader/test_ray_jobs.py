"""Indexes that tasks of a Ray cluster build: the same files, and what goes wrong there is raised here."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataloader.format import DataError
from dataloader.sources.build import build_index
from dataloader.sources.ray_jobs import each_on_ray


class TaskError(Exception):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class Cluster:
    """Does tasks where they are waited for, the last that was asked for first."""

    exceptions = SimpleNamespace(RayTaskError=TaskError)

    def __init__(self, elsewhere: bool = False) -> None:
        self.elsewhere = elsewhere  # where nothing is seen of this machine's files
        self.most = 0
        self.cancelled = 0
        self.running: list[Any] = []

    def remote(self, num_cpus: int) -> Any:
        assert num_cpus == 1
        return lambda function: SimpleNamespace(remote=partial(self.start, function))

    def start(self, function: Any, work: Any, piece: Any, seen: Path) -> Any:
        task = partial(function, work, piece, seen / "not" if self.elsewhere else seen)
        self.running.append(task)
        self.most = max(self.most, len(self.running))
        return task

    def wait(self, tasks: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        assert set(tasks) == set(self.running)
        last = self.running.pop()
        return [last], [task for task in tasks if task is not last]

    def get(self, task: Any) -> None:
        try:
            task()
        except Exception as error:
            raise TaskError(error) from error

    def cancel(self, task: Any, force: bool) -> None:
        self.cancelled += 1


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    for number in range(5):
        texts = [f"text {i} of {number}" for i in range(20)]
        pq.write_table(pa.table({"text": texts}), tmp_path / f"source/{number}.parquet")
    return tmp_path / "source"


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_an_index_is_the_same_whoever_scans(source: Path, tmp_path: Path) -> None:
    cluster = Cluster()
    assert build_index(source, tmp_path / "here", "parquet")
    on = lambda parts: partial(each_on_ray, cluster, parts)  # noqa: E731
    assert build_index(source, tmp_path / "there", "parquet", jobs=3, each_on=on)
    assert cluster.most == 3
    assert cluster.cancelled == 0
    assert files(tmp_path / "here") == files(tmp_path / "there")


def test_what_a_task_raises_is_raised_and_the_others_are_cancelled(tmp_path: Path) -> None:
    def fail(piece: int) -> None:
        if piece == 5:
            raise OSError("the disk of a node")

    cluster = Cluster()
    with pytest.raises(OSError, match="the disk of a node"):
        list(each_on_ray(cluster, tmp_path, fail, range(8), 3))
    assert cluster.cancelled == 2
    assert list(tmp_path.iterdir()) == []


def test_a_node_that_does_not_see_the_folder_is_named(source: Path, tmp_path: Path) -> None:
    on = lambda parts: partial(each_on_ray, Cluster(elsewhere=True), parts)  # noqa: E731
    with pytest.raises(DataError, match=r"does not see .*: put --out where all nodes of the cluster see it"):
        build_index(source, tmp_path / "index", "parquet", each_on=on)
    assert not (tmp_path / "index").exists()
