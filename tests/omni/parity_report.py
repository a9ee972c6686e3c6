"""Run the covering array and the full list of the parity matrix, and write docs/parity.md.

    PYTHONPATH=tests python tests/omni/parity_report.py docs/parity.md

Results are kept by commit in a file outside the repository: an interrupted run goes on where it stopped.
"""

import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from parity_matrix import AXES, MOST_RANKS, Case, covering_array, full_list, space
from parity_runs import STEPS, configure, distance, run, write_data
from ranks import RankError, RankPool

from omni.training.parity import TOLERANCE, WEIGHT_TOLERANCE, Measurement

ROOT = Path(__file__).parents[2]
MEASURED = ("omni", "infra", "dataloader", "pipeline", "parallel", "ops", "hydra_conf")


@dataclass(frozen=True)
class Result:
    """One case: relative differences, infinite if it failed, and the parameters where they are worst."""

    name: str
    ranks: int
    seconds: float
    loss: float = math.inf
    square: float = math.inf
    square_of: str = ""
    gradient: float = math.inf
    gradient_of: str = ""
    weights: float = math.inf
    weights_of: str = ""

    @property
    def ran(self) -> bool:
        """Whether there is a measurement; if not, the next run of this script tries again."""
        return bool(self.gradient_of)

    @property
    def holds(self) -> bool:
        """Whether the case is within tolerance; nan is not."""
        first = (self.loss, self.square, self.gradient)
        return all(x <= TOLERANCE for x in first) and self.weights <= WEIGHT_TOLERANCE


def results(cases: Sequence[Case], cache: Path) -> Iterator[Result]:
    """Yield the result of each case; those that `cache` does not hold are run and added to it."""
    lines = cache.read_text().splitlines() if cache.exists() else []
    had = {result.name: result for result in (Result(**json.loads(line)) for line in lines)}
    references: dict[Case, Measurement] = {}
    ranks = RankPool()
    with tempfile.TemporaryDirectory() as folder, cache.open("a") as file:
        write_data(Path(folder))
        try:
            for case in cases:
                if case.name not in had:
                    had[case.name] = _result(ranks, case, Path(folder), references)
                    if had[case.name].ran:
                        print(json.dumps(asdict(had[case.name])), file=file, flush=True)
                yield had[case.name]
        finally:
            ranks.close()


def _result(ranks: RankPool, case: Case, folder: Path, references: dict[Case, Measurement]) -> Result:
    start, alone = time.perf_counter(), case.reference
    try:
        if alone not in references:
            references[alone] = run(ranks, configure(alone, folder), alone.world)
        found = distance(references[alone], run(ranks, configure(case, folder), case.world))
    except (RankError, ValueError) as error:
        print(error, file=sys.stderr)
        return Result(case.name, case.world, time.perf_counter() - start)
    return Result(
        case.name,
        case.world,
        time.perf_counter() - start,
        found.loss,
        found.square.relative,
        found.square.name.removeprefix("squared norm of "),
        found.gradient.relative,
        found.gradient.name,
        found.weights.relative,
        found.weights.name,
    )


def main(target: Path) -> int:
    """Run everything and write the page. Returns 1 if a case failed or is beyond tolerance."""
    code = commit()
    cache = Path(tempfile.gettempdir()) / f"omni-parity-{code.replace(' ', '-')}.jsonl"
    print(f"results are kept in {cache}")
    cases = list(dict.fromkeys((*covering_array(), *full_list())))
    by_name: dict[str, Result] = {}
    for result in results(cases, cache):
        by_name[result.name] = result
        print(
            f"{len(by_name):4}/{len(cases)}  {result.ranks} ranks {result.seconds:6.1f} s  "
            f"gradient {result.gradient:.1e}  weights {result.weights:.1e}  {result.name}"
            f"{'' if result.holds else '  DOES NOT HOLD'}",
            flush=True,
        )
        target.write_text(page(code, by_name))
    return int(not all(result.holds for result in by_name.values()))


def commit() -> str:
    """Name the code that is measured: packages and configuration."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = " with changes" if git("status", "--porcelain", "--", *MEASURED) else ""
    return (git("rev-parse", "--short", "HEAD") or "unknown") + changed


def machine() -> str:
    """Name the machine and the libraries."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (
        f"{os.cpu_count()} cores of {models[0] if models else platform.machine()}, gloo, "
        f"torch {version('torch')}, megatron-core {version('megatron-core')}, "
        f"Python {platform.python_version()}"
    )


def page(code: str, by_name: Mapping[str, Result]) -> str:
    """Compose the page from what is known so far."""
    few = [by_name[case.name] for case in covering_array() if case.name in by_name]
    whole = {case: by_name[case.name] for case in full_list() if case.name in by_name}
    return PAGE.format(
        ranks=MOST_RANKS,
        steps=STEPS,
        tolerance=power(TOLERANCE),
        weight_tolerance=power(WEIGHT_TOLERANCE),
        axes="\n".join(f"| {axis} | {', '.join(map(str, AXES[axis]))} | {SAYS[axis]} |" for axis in AXES),
        space=f"{len(space().places):,}",
        num_few=len(covering_array()),
        few=table(few),
        num_whole=len(full_list()),
        summary=summary(whole),
        day=date.today().isoformat(),
        code=code,
        machine=machine(),
    )


def table(found: Sequence[Result]) -> str:
    """One line a case."""
    return "\n".join(
        f"| `{r.name}` | {r.ranks} | {power(r.gradient)} | {power(r.loss)} | {power(r.weights)} |"
        for r in found
    )


def summary(whole: Mapping[Case, Result]) -> str:
    """What the full list came to, and the worst gradient by value of each axis."""
    found = list(whole.values())
    if not found:
        return "Not run yet."
    bad = [result.name for result in found if not result.holds]
    lines = [
        f"Run: {len(found)} of {len(full_list())}, in {sum(r.seconds for r in found) / 60:.0f} minutes; "
        + (f"**{len(bad)} do not hold**: {'; '.join(bad)}." if bad else "all within tolerance."),
        "",
        "| | worst | in | case |",
        "|---|---|---|---|",
    ]
    gradient = max(found, key=lambda result: result.gradient)
    loss = max(found, key=lambda result: result.loss)
    square = max(found, key=lambda result: result.square)
    weights = max(found, key=lambda result: result.weights)
    lines += [
        f"| gradient | {power(gradient.gradient)} | {gradient.gradient_of} | {gradient.name} |",
        f"| loss | {power(loss.loss)} | | {loss.name} |",
        f"| squared norm | {power(square.square)} | {square.square_of} | {square.name} |",
        f"| weights | {power(weights.weights)} | {weights.weights_of} | {weights.name} |",
        "",
        "| axis | worst gradient by value, and the number of cases that have it |",
        "|---|---|",
    ]
    for axis, values in AXES.items():
        entries = []
        for value in values:
            those = [result.gradient for case, result in whole.items() if getattr(case, axis) == value]
            if those:
                entries.append(f"{value}: {power(max(those))} ({len(those)})")
        lines.append(f"| {axis} | {' · '.join(entries)} |")
    return "\n".join(lines)


def power(x: float) -> str:
    """A number in two digits, such as 3.1·10⁻⁷."""
    if x == 0 or not math.isfinite(x):
        return str(x) if x else "0"
    digits, _, exponent = f"{x:.1e}".partition("e")
    superscript = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{superscript}" if digits == "1.0" else f"{digits}·10{superscript}"


SAYS = {
    "tp": "tensor parallelism of the LLM, with sequence parallelism",
    "cp": "context parallelism",
    "pp": "pipeline stages",
    "dp": "replicas",
    "ep": "ranks that divide the experts",
    "encoder_tp": "tensor parallelism of the image encoder",
    "placement": "which ranks encode",
    "beside": "encoder ranks, if disaggregated",
    "domain": "least number of replicas that plan together (`layout.domain`)",
    "model": "MLPs, or four experts of which each token takes two, and a shared one",
    "encoder_sp": "how items are shared among encoder ranks",
    "llm_sp": "how sequences are shared among the ranks of a stage",
    "schedule": "order of the pipeline",
    "recompute": "of activations, in LLM and encoder",
    "boundary": "transport of encoder rows",
    "data": "uneven items, or a single one: some encoder ranks have none",
    "frozen": "components that do not train: the encoder, the LLM, or one in each step",
}

PAGE = """\
# Parity

One model on one batch, under every combination of layouts: loss, norms, every gradient and the weights after
{steps} steps equal those of one rank in fp32. `make parity` runs all of this page and writes it; `make test`
and `make test-slow` run the covering array; `omni parity` compares any two configurations.

## What is compared

A measurement takes the way that training takes: planner, verifier, engine, distributed optimizer. Loss and
gradients of the first step, and weights after step {steps}, are collected from the shards that ranks own, by
names that do not depend on a layout. Every copy of a parameter is compared. Squared norms of the first
step are those that clip its gradients.

- Loss and gradients: ‖a − b‖ / max(‖b‖, 10⁻⁶ · global norm) ≤ {tolerance}, for each parameter by itself.
- Squared gradient norm of each component, as the ranks count it together: |a − b| / b ≤ {tolerance}.
- Weights: the same measure ≤ {weight_tolerance}, with AdamW at ε = 10⁻⁴, since Adam turns rounding into
  signs.
- The model has 4 layers, 8 heads over 4 key/value heads and tied embeddings. Experts have no auxiliary loss;
  the narrowest choice of one is asserted to be wider than 10⁻⁴, so that rounding flips none.
- The batch has items of 16 to 256 tokens, two of them in one sample, samples of text alone and a microbatch
  without items. A second dataset leaves encoder ranks without items. Links cost nothing, so that policies do
  share sequences this short. Tests assert all of this for each case of the covering array.

`tests/omni/test_parity.py` has what needs few layouts: untied embeddings, biases, LayerNorm, heads of their
own size, normed heads, a feed-forward without gates, other routers,
frozen components, and that placeholders shifted by one fail, as does a norm counted wrong.
`tests/omni/test_parity_matrix.py` adds what no pair of values shows: an expert whose shards lie on ranks that
differ in tp, encoder tp groups that span pipeline stages, ZB-H2 and `joint_uniform`.
`tests/omni/test_systems.py` trains every preset of a [system](systems.md) so, `tests/omni/test_zero.py`
trains [ZeRO-2 and 3](running.md#zero), and `tests/omni/test_bf16.py` compares ranks in bf16.

Parity compares the code with itself. What every rank does wrong alike is held against equations and
definitions: [tests.md](tests.md).

## Axes

| axis | values | |
|---|---|---|
{axes}

On at most {ranks} ranks, without what the platform refuses and without settings that change nothing where
they are set (a transport where no row leaves its rank), they have {space} combinations. A test holds what is
refused against the rules.

## The covering array

{num_few} cases, in which any two values occur together that do so in any combination. What a name leaves out
is as on one rank. Relative differences, the worst of each kind:

| case | ranks | gradient | loss | weights |
|---|---|---|---|---|
{few}

## The full list

All {num_whole} combinations of the first eight axes, each once, with those values of the other axes whose
pairs occur least in the list before it.

{summary}

Measured {day}, commit {code}, {machine}.
"""

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
