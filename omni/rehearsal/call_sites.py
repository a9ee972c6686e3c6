"""Where in the program something happens: its thread, and the function that is neither torch's nor ours."""

import sys
import threading
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

# Modules whose frames are not where something comes from.
_BELOW = {
    "torch",
    "contextlib",
    "functools",
    "threading",
    "concurrent",
    "importlib",
    "typing_extensions",
}


class CallSite(NamedTuple):
    """A `line` of the innermost `function` that is not torch's, by its full name; where it is megatron's,
    `caller` is the innermost one of ours, with its line.
    """

    function: str
    line: int
    caller: str

    def __str__(self) -> str:
        return f"{self.function}:{self.line}" + (f", from {self.caller}" if self.caller else "")


class CallSites:
    """Finds places. It remembers which code is whose: it is asked at every launch."""

    def __init__(self) -> None:
        self._names: dict[CodeType, tuple[str, bool]] = {}  # the name, none if below; whether megatron's

    def here(self) -> CallSite:
        """The place that the caller was called from."""
        inner = None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            known = self._names.get(frame.f_code)
            if known is None:
                known = self._names[frame.f_code] = _owner(frame)
            function, is_megatrons = known
            if function and not is_megatrons:
                line = frame.f_lineno
                return CallSite(*inner, f"{function}:{line}") if inner else CallSite(function, line, "")
            if function and inner is None:
                inner = (function, frame.f_lineno)
            frame = frame.f_back
        if inner:
            return CallSite(*inner, "")
        node: Any = torch._C._current_autograd_node()
        return CallSite(f"autograd.{node.name() if node else 'unknown'}", 0, "")


def _owner(frame: FrameType) -> tuple[str, bool]:
    module = str(frame.f_globals.get("__name__", ""))
    if module.partition(".")[0] in _BELOW or module.startswith("omni.rehearsal"):
        return "", False
    return f"{module}.{frame.f_code.co_qualname}", module.startswith("megatron.")


def thread_name() -> str:
    """Which of the run's threads this is."""
    name = threading.current_thread().name
    if name == "MainThread":
        return "engine"
    return "autograd" if name.startswith("Dummy") else name.split("_")[0]
