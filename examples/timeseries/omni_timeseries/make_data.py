"""A synthetic dataset: multivariate series, and what they are in words.

    python -m omni_timeseries.make_data --out data/timeseries

Nothing in it was measured. Each channel is a sine of a period of its own, a weaker and much slower sine, and
noise, at a scale and an offset of its own. The description says what only the series tells: how many
channels there are, which one is fastest, and its period in steps. Held-out series are other draws of the
same kind.
"""

import argparse
import io
from pathlib import Path

import numpy as np

from omni.encoders import PLACEHOLDER, DatasetWriter, Item, Sample, get_tokenizer, is_intact

COUNTS = ("one channel", "two channels", "three channels")
ORDINALS = ("first", "second", "third")
PERIODS = {6: "six", 8: "eight", 10: "ten", 12: "twelve", 16: "sixteen", 20: "twenty", 24: "twenty four"}
NOISE = 0.2  # standard deviation, relative to the sine of amplitude one
STEPS = (48, 192)  # shortest and longest series


def describe(channels: int, fastest: int, period: int) -> str:
    """Say in words what a series is: channels, the number of the fastest from 0, its period in steps."""
    which = f", the {ORDINALS[fastest]} is fastest" if channels > 1 else ""
    return f"{COUNTS[channels - 1]}{which}, period {PERIODS[period]}"


def make_series(rng: np.random.Generator, steps: int, channels: int, fastest: int, period: int) -> np.ndarray:
    """Draw float32 [steps, channels]; the other channels have periods of 1.5 to 4 times `period` steps."""
    periods = period * rng.uniform(1.5, 4.0, channels)
    periods[fastest] = period
    time = np.arange(steps)[:, None]
    phases = rng.uniform(0, 2 * np.pi, (2, channels))
    series = np.sin(2 * np.pi * time / periods + phases[0])
    series += 0.5 * np.sin(2 * np.pi * time / rng.uniform(150, 400, channels) + phases[1])
    series += rng.normal(0, NOISE, series.shape)
    scales, offsets = np.exp(rng.normal(0, 1, channels)), rng.normal(0, 2, channels)
    return (series * scales + offsets).astype(np.float32)


def make_sample(rng: np.random.Generator, name: str) -> Sample:
    """Draw a series and describe it."""
    steps = int(rng.integers(STEPS[0], STEPS[1] + 1))
    channels = int(rng.integers(1, len(COUNTS) + 1))
    fastest, period = int(rng.integers(channels)), int(rng.choice(list(PERIODS)))
    series = make_series(rng, steps, channels, fastest, period)
    return Sample(name, PLACEHOLDER + describe(channels, fastest, period), (to_item(series),))


def to_item(series: np.ndarray) -> Item:
    """Store a series [steps, channels] as the bytes of a .npy file."""
    out = io.BytesIO()
    np.save(out, series, allow_pickle=False)
    return Item("timeseries", "npy", series.shape, out.getvalue())


def write_dataset(path: Path, num_samples: int, seed: int, part: int) -> bool:
    """Write part 0 (train) or 1 (held out) of the draws of `seed`; False if it is there and intact."""
    recipe = f"synthetic time series: {num_samples} samples, seed {seed}, part {part}"
    tokenizer = get_tokenizer("bytes")
    if is_intact(path, recipe, tokenizer):
        return False
    rng = np.random.default_rng([seed, part])
    with DatasetWriter(path, tokenizer, recipe=recipe) as writer:
        for number in range(num_samples):
            writer.add(make_sample(rng, f"{path.name}-{number:05d}"))
    return True


def main() -> None:
    """Write the datasets `train` and `heldout` into a folder."""
    parser = argparse.ArgumentParser(description="Write a synthetic dataset of time series in words.")
    parser.add_argument("--out", type=Path, default=Path("data/timeseries"), metavar="DIR")
    parser.add_argument("--num", type=int, default=8000, help="training samples (default: 8000)")
    parser.add_argument("--num-heldout", type=int, default=200, help="held-out samples (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default: 0)")
    args = parser.parse_args()
    for part, (name, count) in enumerate({"train": args.num, "heldout": args.num_heldout}.items()):
        written = write_dataset(args.out / name, count, args.seed, part)
        print(f"{args.out / name}: {'written' if written else 'is there and intact, nothing to do'}")


if __name__ == "__main__":
    main()
