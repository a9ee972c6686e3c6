"""Puts the examples and other tests' helpers on the path; ranks started later inherit it."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
EXAMPLES = ("timeseries", "baselines")
sys.path += [str(TESTS.parent / "examples" / name) for name in EXAMPLES]
sys.path += [str(TESTS / room) for room in ("e2e", "parallel", "pipeline")]
