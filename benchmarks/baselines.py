"""What benchmarks say that compare with policies of other systems, where these are not installed."""

import sys
from importlib.util import find_spec


def say_if_missing() -> None:
    """Say that what is registered lacks the policies of examples/baselines, and how to install them."""
    if find_spec("omni_baselines") is None:
        install = "pip install --no-deps -e examples/baselines"
        print(f"without policies of other systems; to compare with them: {install}", file=sys.stderr)
