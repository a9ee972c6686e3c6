"""What only a GPU would show is found where it is planted, and named."""

from pathlib import Path

import pytest
from cuda_faults import FAULTS, found
from fake_gpu import FakeGPU
from parity_runs import write_data

# What the harness says of each: where in the step and on which thread, or what the device refuses.
SAYS = {
    "CPU tensor in a product": "found at least two devices, cuda:0 and cpu",
    "CPU tensor in a sum": "found at least two devices, cuda:0 and cpu",
    "product of two dtypes": "mm: a product of torch.bfloat16 and torch.float32",
    "float64": "forward (engine): float64, _to_copy",
    "item": "forward (engine): the host waits, a number is read",
    "branch on a value": "forward (engine): the host waits, a number is read",
    "tolist": "forward (engine): the host waits, tolist()",
    "cpu": "forward (engine): the host waits, a copy from the device, pageable, blocking",
    "nonzero": "the host waits, nonzero, whose shape depends on values",
    "boolean index": "the host waits, index, whose shape depends on values",
    "tensor from numbers": "forward (engine): the host waits, a copy to the device, pageable, blocking",
    "tensor made on the CPU": "forward (engine): the host waits, a copy to the device, pageable, blocking",
    "copy that is not pinned": "the host waits, a copy to the device, pageable, non-blocking",
    "pinned copy that blocks": "the host waits, a copy to the device, pinned, blocking",
    "hook on a gradient": "backward (autograd): the host waits, a number is read",
    "copy in the engine": "ship (engine): the host waits, a copy to the device, pageable, blocking",
    "synchronize": "backward (engine): the host waits, cuda.synchronize()",
    "event": "wait for return (engine): the host waits, event.synchronize()",
    "stream": "update (engine): the host waits, stream.synchronize()",
    "pageable index list": "assemble (assembler): the host waits, a copy to the device, pageable, blocking",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults")
    write_data(path)
    return path


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_named(gpu: FakeGPU, folder: Path, name: str) -> None:
    said = gpu.run(found, name, folder)
    assert any(SAYS[name] in line for line in said), said
    assert all("cuda_faults" in line for line in said if "the host waits" in line)
