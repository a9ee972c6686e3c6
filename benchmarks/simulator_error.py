"""How far simulated steps are off published ones, on rows that knobs were not fitted on.

    python benchmarks/simulator_error.py              # two rounds of fitting, 4 minutes on two cores
    python benchmarks/simulator_error.py --quick      # one, 2 minutes
    python benchmarks/simulator_error.py --command 7  # the command that plans row 7

`published_throughput.csv` has a row for each published run of text alone: which software ran it, the model,
the layout, and what it took. What its source does not state stands in `assumed`: four virtual stages where
there are several stages, microbatches of one sequence, no recomputation.

Each row is planned, and its op lists are simulated as its framework overlaps (`omni/planning/frameworks.py`).
A step of many microbatches is taken from two short ones: its time is linear in microbatches. What is fitted
are `Knobs`, the same for all rows: what training reaches of the rates that products of large matrices were
measured to reach, what launches cost, what is waited for. Cross-validation leaves each model out in turn,
then each cluster; errors are those of rows that were left out, in tokens/s. Beside them stands a roofline
with one share of the peak a family (`simulator_roofline.py`), fitted on the same folds. Rows of equal
configurations differ, by their software's release: `forced` is the mean error that any prediction has on
them. The folds hold back the knobs alone: the model's form, frameworks and neutral knobs were chosen with all
rows in sight.

Ends with a line of JSON; leaves with 1 where an error is above its target and above what equal rows force, or
not a fifth below the roofline's.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from statistics import mean

import numpy as np
import numpy.typing as npt
from simulator_roofline import roofline
from simulator_rows import Knobs, Row, rows_of, seconds_of

TARGETS = {"dense bf16": 0.10, "dense low": 0.20, "experts": 0.30}
OF_MODELS = 0.15  # leaving a model out, all families together
BELOW = 0.8  # of the roofline's error
FOLDS: Mapping[str, Callable[[Row], str]] = {
    "model": lambda row: row.model,
    "cluster": lambda row: row.cluster,
}
_PRIOR = 0.1  # of a residual: what a knob's neutral value counts
_HUBER = 0.1
_ROUNDS = 2

Vector = npt.NDArray[np.float64]
Errors = dict[int, float]
"""Errors of predicted tokens/s by the number of the row."""
OfFolds = Mapping[str, tuple[Errors, Errors]]
"""By what was left out: ours and the roofline's."""


def fitted(rows: Sequence[Row], logs: Vector, slopes: Vector, at: Vector) -> Vector:
    """Return the logarithms of knobs over neutral ones that fit rows best: `logs` [n] are those of simulated
    over published seconds at `at` [k], `slopes` [n, k] how they change with it.

    Least squares of relative errors, those of equal rows counting as one, with large ones counting linearly
    (Huber, 1964), and each knob held to its neutral value a little.
    """
    alike = Counter(row.alike for row in rows)
    weights = np.array([alike[row.alike] ** -0.5 for row in rows])
    x = at.copy()
    for _ in range(50):
        residuals = logs + slopes @ (x - at)
        robust = np.sqrt(np.minimum(1, _HUBER / np.maximum(np.abs(residuals), 1e-9))) * weights
        left = np.vstack([slopes * robust[:, None], _PRIOR * np.eye(len(x))])
        right = np.concatenate([(slopes @ at - logs) * robust, np.zeros(len(x))])
        x = np.linalg.lstsq(left, right, rcond=None)[0]
    return x


def knobs_at(x: Vector) -> Knobs:
    """Return the knobs whose logarithms over neutral ones are given."""
    return Knobs(*(neutral * float(of) for neutral, of in zip(Knobs(), np.exp(x), strict=True)))


class Fit:
    """Rows, and how their simulated times change with knobs around the best fit of all of them. Rows are
    planned and simulated by the processes of `pool`.
    """

    def __init__(self, rows: Sequence[Row], pool: Executor, rounds: int) -> None:
        self.rows, self.pool = list(rows), pool
        self.x = np.zeros(len(Knobs()))
        for _ in range(rounds):
            self.logs, self.slopes = self._around(self.x)
            self.at, self.x = self.x, fitted(self.rows, self.logs, self.slopes, self.x)

    def without(self, left_out: Sequence[Row]) -> Knobs:
        """Return the knobs that fit the other rows."""
        kept = [at for at, row in enumerate(self.rows) if row not in left_out]
        rows = [self.rows[at] for at in kept]
        return knobs_at(fitted(rows, self.logs[kept], self.slopes[kept], self.at))

    def seconds(self, asked: Sequence[tuple[Row, Sequence[Knobs]]]) -> list[list[float]]:
        """Return the simulated seconds of rows, each under some knobs; of equal rows and knobs once."""
        first = {row.alike: row.number for row in reversed(self.rows)}
        keys = [(first[row.alike], tuple(knobs)) for row, knobs in asked]
        several = {key: self.pool.submit(seconds_of, *key) for key in dict.fromkeys(keys)}
        return [several[key].result() for key in keys]

    def _around(self, x: Vector) -> tuple[Vector, Vector]:
        """Logarithms of simulated over published seconds, and their slopes."""
        step, names = 0.05, Knobs._fields
        moved = dict(zip(names, (knobs_at(x + move) for move in step * np.eye(len(x))), strict=True))
        asked = [(row, [knobs_at(x), *(moved[name] for name in row.knobs)]) for row in self.rows]
        logs, slopes = np.zeros(len(self.rows)), np.zeros((len(self.rows), len(x)))
        for at, (row, times) in enumerate(zip(self.rows, self.seconds(asked), strict=True)):
            logs[at] = np.log(times[0] / row.published_s)
            for name, time_s in zip(row.knobs, times[1:], strict=True):
                slopes[at, names.index(name)] = np.log(time_s / times[0]) / step
        return logs, slopes


def errors_of_folds(fit: Fit, key: Callable[[Row], str]) -> tuple[Errors, Errors]:
    """Return the errors of the folds that leave a model or a cluster out: ours and the roofline's."""
    asked, simple = [], {}
    for name in sorted({key(row) for row in fit.rows}):
        out = [row for row in fit.rows if key(row) == name]
        predicted = roofline([row for row in fit.rows if row not in out])
        simple |= {row.number: off(row, predicted(row)) for row in out}
        knobs = fit.without(out)
        asked += [(row, [knobs]) for row in out]
    times = fit.seconds(asked)
    return {row.number: off(row, time_s) for (row, _), (time_s,) in zip(asked, times, strict=True)}, simple


def off(row: Row, seconds: float) -> float:
    """The error of predicted tokens/s."""
    return abs(row.published_s / seconds - 1)


def forced(rows: Sequence[Row]) -> float:
    """The least mean error of a prediction that is the same for equal configurations."""
    alike = defaultdict(list)
    for row in rows:
        alike[row.alike].append(row)
    least = (min(sum(off(row, one.published_s) for row in of) for one in of) for of in alike.values())
    return sum(least) / len(rows)


def figures(fit: Fit, rows: Sequence[Row], errors: OfFolds) -> dict[str, float]:
    """Return what a family's errors come to."""
    times = fit.seconds([(row, [knobs_at(fit.x)]) for row in rows])
    fitted_on = mean(off(row, time_s) for row, (time_s,) in zip(rows, times, strict=True))
    found = {"rows": float(len(rows)), "fitted": fitted_on}
    for fold, (ours, simple) in errors.items():
        found[f"without_{fold}"] = mean(ours[row.number] for row in rows)
        found[f"roofline_{fold}"] = mean(simple[row.number] for row in rows)
    found["forced"] = forced(rows)
    return {key: round(value, 4) for key, value in found.items()}


def missed(by_family: Mapping[str, Mapping[str, float]], together: Mapping[str, float]) -> list[str]:
    """Say which figures are above their targets."""
    out = []
    for family, of in by_family.items():
        target = max(TARGETS[family], of["forced"])
        for fold in FOLDS:
            if of[f"without_{fold}"] > target:
                out.append(f"{family} without its {fold}: {of[f'without_{fold}']:.1%} of {target:.1%}")
            if of[f"without_{fold}"] > BELOW * of[f"roofline_{fold}"]:
                out.append(f"{family} without its {fold}: not a fifth below the roofline")
    if together["without_model"] > max(OF_MODELS, together["forced"]):
        out.append(f"all without their model: {together['without_model']:.1%} of {OF_MODELS:.1%}")
    return out


def show(fit: Fit, by_family: Mapping[str, Mapping[str, float]], errors: OfFolds) -> None:
    """Print a line a row, by the error without its model, and one a family."""
    of_models, of_clusters = (errors[fold][0] for fold in ("model", "cluster"))
    print("row, without its model and its cluster off by, published s, of")
    for row in sorted(fit.rows, key=lambda row: of_models[row.number]):
        values = row.values
        sizes = " ".join(f"{axis}{values[axis]}" for axis in ("tp", "pp", "vpp", "cp", "ep", "dp"))
        of = f"{of_models[row.number]:7.1%} {of_clusters[row.number]:7.1%} {row.published_s:8.2f}"
        what = f"{row.model} on {values['gpus']} {row.cluster}, {values['precision']}, {sizes}"
        software = f"{values['framework']} {values['release']}".strip()
        print(f"{row.number:3} {of}  {what}, {software}, recompute {values['recompute']}")
    heads = list(next(iter(by_family.values())))
    print(f"\n{'':12}" + "".join(f"{key:>18}" for key in heads))
    for family, of_family in by_family.items():
        print(f"{family:12}" + "".join(f"{of_family[key]:18.4g}" for key in heads))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of fitting")
    parser.add_argument("--command", type=int, metavar="ROW", help="print the command that plans a row")
    options = parser.parse_args()
    rows, start = rows_of(), time.monotonic()
    if options.command:
        (row,) = (row for row in rows if row.number == options.command)
        print(shlex.join(row.command()))
        return 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        fit = Fit(rows, pool, 1 if options.quick else _ROUNDS)
        errors = {fold: errors_of_folds(fit, key) for fold, key in FOLDS.items()}
        by_family = {of: figures(fit, [row for row in rows if row.family == of], errors) for of in TARGETS}
        together = figures(fit, rows, errors)
    show(fit, by_family | {"all": together}, errors)
    knobs = {name: round(value, 4) for name, value in knobs_at(fit.x)._asdict().items()}
    out = missed(by_family, together)
    for line in out:
        print(f"missed: {line}")
    facts = {
        "benchmark": "simulator_error",
        "quick": options.quick,
        "seconds": round(time.monotonic() - start),
    }
    print(json.dumps(facts | {"families": by_family, "all": together, "knobs": knobs, "missed": out}))
    return int(bool(out))


if __name__ == "__main__":
    sys.exit(main())
