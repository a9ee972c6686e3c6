"""Puts the example and the end-to-end tests' helpers on the path; ranks started later inherit it."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS.parent / "examples/timeseries"), str(TESTS / "e2e")]
