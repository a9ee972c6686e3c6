from collections.abc import Iterator

import pytest
from fake_gpu import FakeGPU

from omni.config import ConfigError
from omni.rehearsal import noop_guard


@pytest.fixture(scope="session")
def gpu() -> Iterator[FakeGPU]:
    try:
        noop_guard.built()
    except ConfigError as error:
        pytest.skip(str(error))
    fake = FakeGPU()
    yield fake
    fake.process.shutdown()
