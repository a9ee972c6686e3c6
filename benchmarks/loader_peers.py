"""CPU that loaders take for a picture beside decoding it: ours and others, each in an environment of its own.

    python -m venv peers/webdataset && peers/webdataset/bin/pip install webdataset==1.0.2 simplejpeg pillow
    python -m venv peers/streaming && peers/streaming/bin/pip install mosaicml-streaming==0.13.0 simplejpeg
    python -m venv peers/energon && peers/energon/bin/pip install megatron-energon==7.4.1 simplejpeg
    python benchmarks/loader_peers.py --peers peers [--quick]

The same pictures, JPEGs of 480 x 640 in four tar files with a text each, go through every loader in one
process without workers, and are decoded and resized by the same function. CPU seconds are those of all
threads less those of that function; loaders take turns, and the least of several rounds counts. Ours draws
samples at random, cuts texts into tokens and compares each picture with its checksum, of tars and of shards
of its own; none of the others does. The last line is JSON; the exit code is 1 if ours takes more than half
of the best of the others.
"""

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from loader import HEIGHT, WIDTH, photo

MOST = 0.5  # of what the best of the others takes
PEERS = ("webdataset", "energon", "streaming")
OURS = ("omni", "omni_tars")
TARS = 4


def write_tars(folder: Path, samples: int) -> None:
    """Write so many pictures, of 16 different ones, with a text each."""
    folder.mkdir(parents=True)
    photos = [photo(HEIGHT, WIDTH, seed) for seed in range(16)]
    for number in range(TARS):
        with tarfile.open(folder / f"{number:05}.tar", "w") as tar:
            for at in range(number, samples, TARS):
                for end, content in (("jpg", photos[at % 16]), ("txt", f"picture {at}".encode())):
                    member = tarfile.TarInfo(f"{at:06}.{end}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def beside_us(python: Path, loader: str, folder: Path) -> float:
    """Microseconds of CPU of a sample beside decoding."""
    file = Path(__file__).with_name("loader_peer.py")
    done = subprocess.run([python, file, loader, folder], capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{loader} failed under {python}:\n{done.stderr[-2000:]}")
    said = json.loads(done.stdout.splitlines()[-1])
    return 1e6 * (said["cpu_s"] - said["decoded_s"]) / said["samples"]


def main() -> int:
    """Measure all that are there, print, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, required=True, metavar="DIR", help="environments by name")
    parser.add_argument("--quick", action="store_true", help="fewer pictures and rounds")
    given = parser.parse_args()
    pythons = {name: given.peers.absolute() / name / "bin" / "python" for name in PEERS}
    if missing := [name for name, python in pythons.items() if not python.exists()]:
        parser.error(f"--peers {given.peers} has no environment of {', '.join(missing)}: see --help")
    pythons |= dict.fromkeys(OURS, Path(sys.executable))
    least = dict.fromkeys(pythons, float("inf"))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_tars(folder / "tars", 256 if given.quick else 512)
        for _ in range(2 if given.quick else 4):
            for name, python in pythons.items():
                least[name] = min(least[name], beside_us(python, name, folder))
    best = min(least[name] for name in PEERS)
    missed = []
    for name, own in least.items():
        print(
            f"{name:12} {own:7.1f} µs a picture beside decoding, {own / best:.2f} of the best of the others"
        )
        if name in OURS and own > MOST * best:
            missed.append(f"{name} takes {own / best:.2f} of the best of the others, more than {MOST}")
    print("\n".join(f"missed: {text}" for text in missed))
    figures = {name: round(own, 1) for name, own in least.items()}
    print(json.dumps({"benchmark": "loader_peers", "us": figures, "missed": missed}))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
