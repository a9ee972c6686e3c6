"""Build and load the device guard that lets fake tensors live on device "cuda" where there is no GPU.

`noop_cuda.cpp` is compiled against the headers of the installed torch, in seconds, when it is first needed,
and kept in the user's cache under a name that tells sources and installed torches apart: a guard loads the
libraries of the torch that it was built with. torch asks once in a process whether there is a CUDA device, at
its import, so the guard is loaded before: this module imports no torch.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from dataloader.node_cache import make_own
from omni.config import ConfigError

COMPILE_S = 600.0  # for a compiler that is busy: it takes half a minute of a core
_SOURCE = Path(__file__).with_name("noop_cuda.cpp")


def install() -> None:
    """Give this process, for as long as it lives, a CUDA device that computes nothing.

    Raises:
        ConfigError: where torch was imported before, knows a real CUDA, or there is no compiler.
    """
    if "torch" in sys.modules:
        raise ConfigError(
            "--device cuda: torch was imported already, and asks only once for a GPU: give the rehearsal a "
            "process of its own"
        )
    guard = ctypes.PyDLL(str(built()), ctypes.RTLD_GLOBAL)
    from omni.rehearsal import fake_cuda

    fake_cuda.install(guard)


def built() -> Path:
    """Return the compiled guard, building it if it is not there."""
    found = importlib.util.find_spec("torch")
    assert found is not None, "torch is not installed"
    assert found.origin is not None
    torch = Path(found.origin).parent
    if any((torch / "lib").glob("libtorch_cuda*")):
        raise ConfigError(
            "--device cuda: this torch is built for CUDA, and a stand-in cannot take its place: rehearse in "
            "an environment with torch's build for CPUs (https://download.pytorch.org/whl/cpu), or without "
            "--device cuda"
        )
    library = kept(torch)
    try:
        make_own(library.parent)
    except OSError as error:
        raise ConfigError(
            f"--device cuda: {error}. A library is loaded from there: make it yours alone (chmod 700), or "
            f"name another folder in XDG_CACHE_HOME"
        ) from error
    if not library.exists():
        _compile(torch, library)
    return library


def kept(torch: Path) -> Path:
    """Return where the guard is kept that was built with the installed version of torch, in this folder."""
    which = f"{importlib.metadata.version('torch')} in {torch}"
    key = hashlib.sha256(_SOURCE.read_bytes() + which.encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omni"
    return cache / f"noop_cuda-{key.hexdigest()[:16]}.so"


def _compile(torch: Path, library: Path) -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"--device cuda: there is no C++ compiler {compiler!r} to build {_SOURCE.name} with: install "
            "g++, or name another compiler in the environment variable CXX"
        )
    include, lib = torch / "include", torch / "lib"
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        headers = (f"-I{include}", f"-I{include}/torch/csrc/api/include")
        libraries = (f"-L{lib}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}")
        line = (compiler, "-shared", "-fPIC", "-O0", "-std=c++20", *headers, str(_SOURCE), "-o", str(built))
        try:
            done = subprocess.run((*line, *libraries), capture_output=True, text=True, timeout=COMPILE_S)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"--device cuda: {compiler} has not built {_SOURCE} in {COMPILE_S:g} s, which takes it "
                f"seconds: look whether it waits for a licence or a file system, or name another one in CXX"
            ) from error
        if done.returncode:
            raise ConfigError(f"--device cuda: {compiler} could not build {_SOURCE}:\n{done.stderr[-2000:]}")
        built.replace(library)  # at once, whoever else builds it now
