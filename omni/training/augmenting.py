"""Which pictures of a step are changed, and by which key: `data.sources.<name>.augment`."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np

from dataloader.augment import Augment, Change, key_of
from dataloader.loader import Fetch
from dataloader.stream import Stream
from dataloader.tokens import SampleMeta
from omni.planning.run_spec import RunSpec
from omni.planning.world_planner import WorldPlanner
from pipeline.plan import Taken


@dataclass(frozen=True)
class Augmenting:
    """Changes pictures of the sources that `of` names, in a run of this seed."""

    of: Mapping[str, Augment]
    seed: int
    world: WorldPlanner

    def fetch(self, fetch: Fetch, metas: Iterable[SampleMeta], taken: Taken) -> Fetch:
        """A fetch of samples, whose `metas` these are, that changes their pictures, by the epochs in what the
        step has `taken`.
        """
        if not any(source in self.of for source, _, _ in fetch.items):
            return fetch
        epochs = self._epochs(taken)
        items = {(meta.source, meta.id): meta.items for meta in metas}

        def change(source: str, sample: int, number: int) -> Change | None:
            if source not in self.of or items[source, sample][number].modality != "image":
                return None
            return self.of[source].change(key_of(self.seed, source, sample, number, epochs[source, sample]))

        return replace(fetch, changes=tuple(change(*item) for item in fetch.items))

    def _epochs(self, taken: Taken) -> dict[tuple[str, int], int]:
        """Epochs of the samples of a step by source and id: of one that comes several times, the first."""
        stream = self.world.samples_at(taken.cursor).stream
        assert isinstance(stream, Stream)
        found: dict[tuple[str, int], int] = {}
        sources, ids, epochs = stream.draw(taken.cursor, taken.next_cursor - taken.cursor)
        wanted = [number for number, name in enumerate(stream.names) if name in self.of]
        at = np.flatnonzero(np.isin(sources, wanted))[::-1]  # from behind, so that the first one stays
        for source, sample, epoch in zip(*(of[at].tolist() for of in (sources, ids, epochs)), strict=True):
            found[stream.names[source], sample] = epoch
        return found


def augmenting_of(spec: RunSpec) -> Augmenting | None:
    """What changes pictures of a run, None if nothing does."""
    sources = spec.config.data.sources.items()
    of = {name: Augment(**asdict(source.augment)) for name, source in sources if source.augment is not None}
    return Augmenting(of, spec.config.train.seed, spec.planner.world) if of else None
