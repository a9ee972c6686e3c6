"""What a run trains on: its tokenizer, the indexes of its datasets, and the samples of its steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dataloader.format import DataError
from dataloader.index import Index
from dataloader.item_counts import RememberedCounts
from dataloader.samples import Samples, in_order
from dataloader.stream import SourceSpec, Stream
from dataloader.tokenizer import Tokenizer, get_tokenizer
from dataloader.tokens import SampleMeta
from omni.config import ConfigError
from omni.data_config import DataConfig, HeldoutConfig, SourceConfig
from omni.models.registry import Encoder
from omni.planning.mixture import Mixture, mixture_of
from omni.planning.run_spec import item_count

_SOUGHT = (
    " (relative, so looked for in {}: start where the run was first started, or give the whole path, if it "
    "is elsewhere)"
)


@dataclass(frozen=True)
class RunData:
    """The indexes of the training sources and of those held out, by name, and where steps take samples from.
    Where these are those of a trace, there are no indexes and no later phases.
    """

    indexes: Mapping[str, Index]
    heldout: Mapping[str, Index]
    mixture: Mixture


def open_data(
    data: DataConfig,
    seed: int,
    encoders: Mapping[str, Encoder],
    tokenizer: Tokenizer,
    trace: Sequence[SampleMeta] = (),
) -> RunData:
    """Open the datasets of a run, whose items encoders must take, or take the samples of a trace.

    Raises:
        ConfigError, DataError: naming the source, and what is wrong with it.
    """
    taken = [encoder.modality for encoder in encoders.values()]
    if trace:
        modalities = dict.fromkeys(item.modality for meta in trace for item in meta.items)
        _check_modalities("the trace", tuple(modalities), taken)
        return RunData({}, {}, Mixture(in_order(trace)))
    if not data.sources:
        raise ConfigError("data.sources is empty: name at least one dataset, such as data=quickstart")
    heldout = _open_all("data.heldout", data.heldout, tokenizer, taken)
    indexes = _open_all("data.sources", data.sources, tokenizer, taken)
    for name, index in heldout.items():
        generate = data.heldout[name].generate
        frame = index.manifest.text.frame
        if generate and not (frame.bos or frame.turns):
            raise ConfigError(
                f"data.heldout.{name}.generate={generate}: its samples have no start token to generate from: "
                "set it to 0"
            )
    for name, index in indexes.items():
        if data.sources[name].augment is not None and "image" not in index.manifest.modalities:
            held = ", ".join(index.manifest.modalities) or "texts alone"
            raise ConfigError(f"data.sources.{name}.augment: it has no images, but {held}: leave it out")
    if not any(source.weight for source in data.sources.values()):
        of_each = " ".join(f"data.sources.{name}.weight=0" for name in data.sources)
        raise ConfigError(f"{of_each}: nothing would be drawn: give a source a weight of 1 or more")
    specs = {
        name: SourceSpec(len(index), index.manifest.rows_per_group, data.sources[name].weight)
        for name, index in indexes.items()
    }
    samples = _indexed(Stream(specs, seed, data.window_groups), encoders, indexes)
    return RunData(indexes, heldout, mixture_of(data, samples, indexes))


def tokenizer_of(data: DataConfig) -> Tokenizer:
    """Return the tokenizer of a run.

    Raises:
        ConfigError: if there is none of its name.
    """
    try:
        return get_tokenizer(data.tokenizer)
    except ValueError as error:
        raise ConfigError(f"data.tokenizer={data.tokenizer}: {error}") from error


def _indexed(stream: Stream, encoders: Mapping[str, Encoder], indexes: Mapping[str, Index]) -> Samples:
    """The samples of datasets, in the order of the run."""
    counts = RememberedCounts(partial(item_count, encoders))
    return Samples(
        stream,
        metas=lambda source, sample: indexes[source].meta(sample, source, counts),
        lengths=lambda source, ids, budget, policy: indexes[source].lengths(ids, counts, budget, policy),
        items=lambda source, ids: indexes[source].item_tokens(ids, counts),
    )


def _open_all(
    section: str,
    sources: Mapping[str, SourceConfig] | Mapping[str, HeldoutConfig],
    tokenizer: Tokenizer,
    taken: Sequence[str],
) -> dict[str, Index]:
    """Open the indexes of a section, whose items encoders must take: those of the modalities `taken`."""
    indexes = {}
    for name, source in sources.items():
        try:
            indexes[name] = Index.open(source.path, tokenizer)
        except DataError as error:
            path = Path(source.path)
            sought = "" if path.is_absolute() or path.exists() else _SOUGHT.format(Path.cwd())
            raise DataError(f"{section}.{name}.path={source.path}{sought}: {error}") from error
        _check_modalities(f"{section}.{name}", indexes[name].manifest.modalities, taken)
    return indexes


def _check_modalities(source: str, held: Sequence[str], taken: Sequence[str]) -> None:
    for modality in held:
        if modality not in taken:
            raise ConfigError(
                f"{source} holds {modality} items, and no encoder of model.encoders takes them "
                f"(there are encoders for: {', '.join(taken) or 'nothing'})"
            )
