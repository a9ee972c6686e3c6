"""The house keeps its order: what import-linter's contracts leave to be said."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]


def test_importing_what_plans_loads_no_tensors():
    (pure,) = (contract for contract in SETTINGS["contracts"] if contract["type"] == "forbidden")
    modules = pure["source_modules"]
    assert "pipeline.plan" in modules
    assert len(set(modules)) == len(modules)
    code = f"import sys, {', '.join(modules)}; print(sorted({{'torch', 'megatron'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
