"""How components are split over ranks: named axes, pure arithmetic, no process groups.

Three ideas, each built on the one before:

    Mesh         named axes over a list of ranks: coordinates, the group of any axis or product of axes
    Layout       the sizes that a user gives the LLM: tp·cp·dp·pp, ep for experts over the same ranks, and
                 `vpp`, how many virtual stages of the LLM each of them holds
    Arrangement  everything of a run: the LLM, every encoder with a layout of its own, and the domains in
                 which steps are planned

Rank order, fastest to slowest: tp, cp, dp, pp. The axes that talk most lie closest together, so tensor and
context parallelism stay inside a node and pipeline stages are what crosses between nodes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import gcd, lcm, prod

import numpy as np
import numpy.typing as npt

from parallel.placements import DomainSizes, PlacementPolicy

CONTEXT = 4096  # tokens
MOST_ZERO = 3


class LayoutError(ValueError):
    """A layout that cannot be: the message names the key, the value and the remedy."""


@dataclass(frozen=True)
class Mesh:
    """`sizes` of named axes, fastest first, over `ranks`: rank number i stands at the coordinates of i.

    `aliases` name products of axes.
    """

    sizes: Mapping[str, int]
    ranks: Sequence[int]
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert prod(self.sizes.values()) == len(self.ranks), f"{self.sizes} over {len(self.ranks)} ranks"

    @cached_property
    def _number(self) -> dict[int, int]:
        return {rank: number for number, rank in enumerate(self.ranks)}

    def __contains__(self, rank: int) -> bool:
        return rank in self._number

    def axes(self, names: Iterable[str]) -> tuple[str, ...]:
        """Resolve aliases and leave out axes of one rank, in the mesh's order."""
        wanted = {axis for name in names for axis in self.aliases.get(name, (name,))}
        assert wanted <= set(self.sizes), f"{sorted(wanted)} are not all among {list(self.sizes)}"
        return tuple(axis for axis, size in self.sizes.items() if axis in wanted and size > 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of `rank` on each axis, aliases included."""
        number, at = self._number[rank], {}
        for axis, size in self.sizes.items():
            number, at[axis] = divmod(number, size)
        for alias, parts in self.aliases.items():
            at[alias] = 0
            for axis in reversed(parts):
                at[alias] = at[alias] * self.sizes[axis] + at[axis]
        return at

    def rank(self, **coordinates: int) -> int:
        """Return the rank at `coordinates` of plain axes; axes left out are at 0."""
        number = 0
        for axis, size in reversed(list(self.sizes.items())):
            at = coordinates.get(axis, 0)
            assert 0 <= at < size, f"{axis}={at} outside an axis of {size}"
            number = number * size + at
        return self.ranks[number]

    def group(self, rank: int, *names: str) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only on the named axes, in the mesh's order."""
        return self._along(self._number[rank], self.axes(names))

    def groups(self, *names: str) -> tuple[tuple[int, ...], ...]:
        """Return every group of the product of the named axes, by first rank; together they are the mesh."""
        return tuple(map(tuple, self.table(*names).tolist()))

    def table(self, *names: str) -> npt.NDArray[np.int64]:
        """Return `groups` as an array [groups, members]."""
        axes, slowest_first = self.axes(names), [*self.sizes][::-1]
        inside = [slowest_first.index(axis) for axis in reversed(axes)]
        ranks = np.array(self.ranks, np.int64).reshape([self.sizes[axis] for axis in slowest_first])
        members = prod(self.sizes[axis] for axis in axes)
        return np.moveaxis(ranks, inside, range(-len(inside), 0)).reshape(-1, members)

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        strides, stride = [], 1
        for size in self.sizes.values():
            strides.append(stride)
            stride *= size
        return tuple(strides)

    def _along(self, number: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        offsets = [0]
        for (axis, size), stride in zip(self.sizes.items(), self._strides, strict=True):
            if axis in axes:
                number -= number // stride % size * stride
                offsets = [o + i * stride for i in range(size) for o in offsets]
        return tuple(self.ranks[number + offset] for offset in offsets)


def check_sizes(sizes: Mapping[str, int | None]) -> None:
    """Refuse sizes of the LLM's layout below 1. None is for one that is still to be found out.

    Raises:
        LayoutError: naming the first.
    """
    for name, size in sizes.items():
        if size is not None and size < 1:
            least = {
                "vpp": "a stage of the pipeline holds at least one virtual stage",
                "zero": "1 divides the state of the optimizer among replicas, which all layouts do",
            }.get(name, "an axis has at least one rank")
            raise LayoutError(f"layout.llm.{name}={size}: {least}")
    if (zero := sizes.get("zero") or 1) > MOST_ZERO:
        raise LayoutError(
            f"layout.llm.zero={zero}: 1 divides the state of the optimizer among replicas, 2 gradients too, "
            f"{MOST_ZERO} weights too"
        )


def nearest_divisor(size: int, *totals: int) -> int:
    """The number that divides all of `totals` and is nearest to `size`; of two as near the smaller."""
    whole = gcd(*totals)
    return min((n for n in range(1, whole + 1) if whole % n == 0), key=lambda n: abs(n - size))


@dataclass(frozen=True)
class Layout:
    """Sizes of the LLM's axes. Experts are split `ep` ways over the tp·cp·dp ranks of a stage.

    The layers are divided into pp · `vpp` virtual stages, which go round the stages of the pipeline: number v
    is on stage v % pp. They are divided for tokens of sequences of `context` tokens, which decide what
    attention costs, so that the slowest takes as little as can be.
    `zero` says what replicas divide among them (ZeRO): 1 the state of the optimizer, 2 gradients too, over
    the pool, 3 weights too.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1
    zero: int = 1
    context: int = CONTEXT

    def __post_init__(self) -> None:
        check_sizes(vars(self))
        stage = self.tp * self.cp * self.dp
        if stage % self.ep:
            raise LayoutError(
                f"layout.llm.ep={self.ep} does not divide the {stage} ranks of a stage "
                f"(tp·cp·dp): choose an ep that does: {nearest_divisor(self.ep, stage)} is the nearest"
            )

    @property
    def world(self) -> int:
        """Number of ranks of the LLM."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def num_virtual_stages(self) -> int:
        """Virtual stages of the LLM, on all stages of the pipeline."""
        return self.pp * self.vpp

    def holds(self, stage: int) -> range:
        """Return the numbers of the virtual stages that a stage of the pipeline holds."""
        return range(stage, self.num_virtual_stages, self.pp)

    def describe(self) -> str:
        """Return the layout in one word, such as "dp2·pp2"."""
        sizes = {axis: size for axis, size in vars(self).items() if axis != "context"}
        return "·".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "single"


@dataclass(frozen=True)
class Staged:
    """What of the component with stages decides which groups its ranks need: its name, whether its output is
    `tied` to its embedding, and whether it has `experts`.
    """

    name: str
    tied: bool
    experts: bool


@dataclass(frozen=True)
class Arrangement:
    """Where every component of a run lives. Make it with `arrange`.

    The world is the LLM's ranks, then `encoder_ranks` beside them if the placement has such. It is divided
    into domains of `replicas` copies of the LLM with their encoders: what one domain plans, sends and encodes
    stays inside it; only gradients cross. Ranks of a domain are numbered by domain rank: the LLM's, stage by
    stage, then those of encoders. The `home` of encoders are the neighbouring ranks that they live on,
    from `home[0]` to before `home[1]`, as the policy called `placement` decided. `encoder_tp` gives the
    tensor-parallel size of each encoder; so many neighbouring ranks are a tp group, which encodes as one.
    """

    llm: Layout
    encoder_tp: Mapping[str, int]
    placement: str
    encoder_ranks: int
    replicas: int
    home: tuple[int, int]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.llm.world + self.encoder_ranks

    @property
    def num_domains(self) -> int:
        """Number of domains."""
        return self.llm.dp // self.replicas

    @property
    def pool(self) -> int:
        """Ranks of a stage of a domain that may share sequences: cp · replicas, each of tp ranks."""
        return self.llm.cp * self.replicas

    @property
    def partitions(self) -> int:
        """Ranks among which each matrix of the LLM's layers is divided by ZeRO-2 or 3, 1 without."""
        return self.pool if self.llm.zero > 1 else 1

    @property
    def stage_size(self) -> int:
        """Ranks of one stage of a domain."""
        return self.llm.tp * self.pool

    @property
    def llm_size(self) -> int:
        """Ranks of a domain that hold a stage of the LLM."""
        return self.stage_size * self.llm.pp

    @property
    def virtual_stages_by_stage(self) -> tuple[tuple[int, ...], ...]:
        """The virtual stages that each stage of the pipeline holds."""
        return tuple(tuple(self.llm.holds(stage)) for stage in range(self.llm.pp))

    @property
    def domain_size(self) -> int:
        """Ranks of a domain."""
        return self.world // self.num_domains

    @cached_property
    def mesh(self) -> Mesh:
        """The LLM's ranks: tp, cp, replica (within the domain), domain, pp; dp is replica · domain."""
        sizes = {
            "tp": self.llm.tp,
            "cp": self.llm.cp,
            "replica": self.replicas,
            "domain": self.num_domains,
            "pp": self.llm.pp,
        }
        return Mesh(sizes, range(self.llm.world), {"dp": ("replica", "domain")})

    @cached_property
    def expert_mesh(self) -> Mesh:
        """The same ranks as experts see them: ep, edp, pp."""
        stage = self.llm.world // self.llm.pp
        return Mesh(
            {"ep": self.llm.ep, "edp": stage // self.llm.ep, "pp": self.llm.pp}, range(self.llm.world)
        )

    @cached_property
    def encoder_meshes(self) -> Mapping[str, Mesh]:
        """Each encoder's ranks: tp, tp group (within the domain), domain; dp is slot · domain."""
        domains = [self.global_ranks(domain) for domain in range(self.num_domains)]
        meshes = {}
        for name, tp in self.encoder_tp.items():
            tp_groups = self.tp_groups(name)
            sizes = {"tp": tp, "slot": len(tp_groups), "domain": self.num_domains}
            ranks = tuple(
                of[domain_rank] for of in domains for tp_group in tp_groups for domain_rank in tp_group
            )
            meshes[name] = Mesh(sizes, ranks, {"dp": ("slot", "domain")})
        return meshes

    def tp_groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return the domain ranks of each tp group of an encoder in a domain."""
        tp = self.encoder_tp[name]
        return tuple(tuple(range(start, start + tp)) for start in range(*self.home, tp))

    def global_ranks(self, domain: int) -> tuple[int, ...]:
        """Return the global ranks of a domain by domain rank."""
        llm = self.mesh.group(self.mesh.rank(domain=domain), "tp", "cp", "replica", "pp")
        beside = self.encoder_ranks // self.num_domains
        first = self.llm.world + domain * beside
        return (*llm, *range(first, first + beside))

    def domain(self, rank: int) -> int:
        """Return the domain of a rank."""
        if rank < self.llm.world:
            return self.mesh.coordinates(rank)["domain"]
        return (rank - self.llm.world) // (self.encoder_ranks // self.num_domains)

    def describe(self) -> str:
        """Return all layouts in one line, such as "dp2·pp2, image tp2 on 4 ranks of their own"."""
        split = [f"{name} tp{tp}" for name, tp in self.encoder_tp.items() if tp > 1]
        beside = [f"{self.encoder_ranks} ranks for encoders"] if self.encoder_ranks else []
        return ", ".join([self.llm.describe(), *split, *beside])


def arrange(
    llm: Layout,
    encoder_tp: Mapping[str, int],
    placement: PlacementPolicy,
    encoder_ranks: int,
    replicas: int = 1,
) -> Arrangement:
    """Choose the smallest domains, of at least `replicas` replicas, that hold every shared group.

    Groups of experts and tp groups of encoders lie inside a domain. A tp group lies inside a stage if it can,
    next to ranks that it talks to anyway, else across the stages of a domain.

    Raises:
        LayoutError: if no division of the replicas into equal domains fits.
    """
    if placement.beside != (encoder_ranks > 0):
        takes = "takes at least one rank" if placement.beside else "takes none"
        raise LayoutError(
            f"placement.policy={placement.name} with placement.ranks={encoder_ranks}: this placement {takes} "
            "beside the LLM"
        )
    for name, tp in encoder_tp.items():
        if tp < 1:
            raise LayoutError(f"layout.encoders.{name}.tp={tp}: an axis has at least one rank")
    found = _smallest(llm, encoder_tp, placement, encoder_ranks, replicas)
    if found is not None:
        return found
    of = f"{encoder_ranks} ranks of encoders" if encoder_ranks else f"layout.llm ({llm.describe()})"
    raise LayoutError(
        f"{_keys(encoder_tp)}: placement.policy={placement.name}: {of} cannot be divided into equal groups "
        f"of replicas (dp={llm.dp}) that hold whole tensor-parallel groups of every encoder: choose sizes "
        f"that divide them{_nearest_tp(llm, encoder_tp, placement, encoder_ranks, replicas)}"
    )


def _smallest(
    llm: Layout, encoder_tp: Mapping[str, int], placement: PlacementPolicy, encoder_ranks: int, replicas: int
) -> Arrangement | None:
    """The arrangement with the smallest domains, None where no domains hold every shared group."""
    common_tp = lcm(*encoder_tp.values())
    for inside_stages in (True, False):
        for k in range(replicas, llm.dp + 1):
            beside, rest = divmod(encoder_ranks * k, llm.dp)
            sizes = DomainSizes(llm.pp, llm.tp * llm.cp * k, beside)
            if llm.dp % k or rest or sizes.stage_size % llm.ep:
                continue
            home = placement(sizes)
            if _holds_tp_groups(home, common_tp, sizes, inside_stages):
                return Arrangement(llm, dict(encoder_tp), placement.name, encoder_ranks, k, home)
    return None


def _nearest_tp(
    llm: Layout, encoder_tp: Mapping[str, int], placement: PlacementPolicy, encoder_ranks: int, replicas: int
) -> str:
    """Say which smaller encoder layouts are the nearest that would do: they divide heads, too."""
    most = lcm(*encoder_tp.values())
    for common_tp in (n for n in range(most, 0, -1) if most % n == 0):
        smaller = {name: gcd(tp, common_tp) for name, tp in encoder_tp.items()}
        if _smallest(llm, smaller, placement, encoder_ranks, replicas) is not None:
            return f": {_keys(smaller)} is the nearest"
    return ""


def _keys(encoder_tp: Mapping[str, int]) -> str:
    return ", ".join(f"layout.encoders.{name}.tp={tp}" for name, tp in encoder_tp.items()) or "layout"


def _holds_tp_groups(home: tuple[int, int], common_tp: int, sizes: DomainSizes, inside_stages: bool) -> bool:
    """Whether tp groups of `common_tp` domain ranks divide a home and each is on ranks of the LLM, or each
    beside them; and inside one stage each, if asked.
    """
    bounds = sizes.boundaries() if inside_stages else (0, sizes.llm_size, sizes.size)
    parts = (range(max(home[0], low), min(home[1], high)) for low, high in pairwise(bounds))
    return all(len(part) % common_tp == 0 for part in parts)


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """Divide `total` into `parts` as evenly as can be, larger parts first."""
    share, rest = divmod(total, parts)
    return tuple(share + (part < rest) for part in range(parts))
