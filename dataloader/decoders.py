"""The versions of what turns items into pixels and samples: they decide, bit by bit, what models see."""

from importlib.metadata import PackageNotFoundError, version

import PIL.features
import soundfile
import soxr

_PACKAGES = ("Pillow", "simplejpeg", "soxr", "soundfile", "pyarrow")


def decoder_versions() -> dict[str, str]:
    """Return versions by name, of packages and of the libraries inside them where these say so."""
    found = {name: _version(name) for name in _PACKAGES}
    return found | {
        "libjpeg-turbo of Pillow": str(PIL.features.version("libjpeg_turbo")),
        "zlib of Pillow": str(PIL.features.version("zlib")),
        "libsndfile": soundfile.__libsndfile_version__,
        "libsoxr": soxr.__libsoxr_version__,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # simplejpeg has no wheel for some machines
        return "not installed"
