from collections import Counter
from itertools import combinations, pairwise, product
from math import lcm, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_policies import own

from parallel.layout import Arrangement, Layout, LayoutError, Mesh, arrange, nearest_divisor, split_evenly
from parallel.placements import COLOCATED, DISAGGREGATED, STAGE0, PlacementPolicy
from parallel.stages import stage_layers

PLACEMENTS = list(own(PlacementPolicy).values())
AXES = ("tp", "cp", "dp", "pp")
sizes = st.integers(1, 4)
layouts = st.builds(Layout, tp=sizes, cp=sizes, dp=sizes, pp=sizes)


@st.composite
def meshes(draw) -> Mesh:
    """Up to four axes over ranks in any order, one alias over neighbouring axes or not."""
    names = ("a", "b", "c", "d")[: draw(st.integers(0, 4))]
    axes = {name: draw(sizes) for name in names}
    first = draw(st.integers(0, 100))
    ranks = draw(st.permutations(range(first, first + prod(axes.values()))))
    alias = {"both": tuple(draw(st.permutations(names))[:2])} if len(names) > 1 else {}
    return Mesh(axes, tuple(ranks), alias)


def some_axes(draw, mesh: Mesh) -> tuple[str, ...]:
    return tuple(draw(st.sets(st.sampled_from([*mesh.sizes, *mesh.aliases])))) if mesh.sizes else ()


# Mesh.


@settings(deadline=None)
@given(meshes())
def test_ranks_and_coordinates_are_a_bijection(mesh):
    seen = set()
    for rank in mesh.ranks:
        at = mesh.coordinates(rank)
        plain = {axis: at[axis] for axis in mesh.sizes}
        assert all(0 <= plain[axis] < size for axis, size in mesh.sizes.items())
        assert mesh.rank(**plain) == rank
        seen.add(tuple(plain.values()))
    assert len(seen) == len(mesh.ranks) == prod(mesh.sizes.values())


@settings(deadline=None)
@given(meshes())
def test_the_first_axis_is_the_fastest(mesh):
    order = list(product(*(range(size) for size in reversed(mesh.sizes.values()))))
    for rank, at in zip(mesh.ranks, order, strict=True):
        assert tuple(reversed([mesh.coordinates(rank)[axis] for axis in mesh.sizes])) == at


@settings(deadline=None)
@given(st.data(), meshes())
def test_groups_of_any_axes_partition_the_mesh(data, mesh):
    names = some_axes(data.draw, mesh)
    plain = {axis for name in names for axis in mesh.aliases.get(name, (name,))}
    groups = mesh.groups(*names)
    assert sorted(rank for group in groups for rank in group) == sorted(mesh.ranks)
    place = {rank: number for number, rank in enumerate(mesh.ranks)}
    # The groups by their first rank, and each group by itself, in the order of the mesh.
    assert [place[group[0]] for group in groups] == sorted(place[group[0]] for group in groups)
    for group in groups:
        assert [place[rank] for rank in group] == sorted(place[rank] for rank in group)
        assert len(group) == prod(mesh.sizes[axis] for axis in plain)
        fixed = {tuple(mesh.coordinates(r)[axis] for axis in mesh.sizes if axis not in plain) for r in group}
        assert len(fixed) == 1
        assert all(mesh.group(rank, *names) == group for rank in group)


@settings(deadline=None)
@given(meshes())
def test_an_alias_is_the_product_of_its_axes(mesh):
    for alias, parts in mesh.aliases.items():
        assert mesh.groups(alias) == mesh.groups(*parts)
        for rank in mesh.ranks:
            at = mesh.coordinates(rank)
            assert at[alias] == at[parts[0]] + mesh.sizes[parts[0]] * at[parts[1]]
            numbers = [mesh.coordinates(other)[alias] for other in mesh.group(rank, alias)]
            assert sorted(numbers) == list(range(mesh.sizes[parts[0]] * mesh.sizes[parts[1]]))


def test_axes_of_one_rank_name_no_axes():
    mesh = Mesh({"tp": 2, "cp": 1, "dp": 3}, range(6), {"all": ("cp", "dp")})
    assert mesh.axes(["all", "tp"]) == ("tp", "dp")
    assert mesh.axes(["cp"]) == mesh.axes([]) == ()
    assert mesh.group(4, "cp") == mesh.group(4) == (4,)


def test_what_is_not_in_the_mesh_is_refused():
    mesh = Mesh({"tp": 2, "dp": 2}, range(4))
    assert 3 in mesh
    assert 4 not in mesh
    for rank in (-1, 4):
        with pytest.raises(KeyError):
            mesh.coordinates(rank)
    with pytest.raises(AssertionError, match="tp=2"):
        mesh.rank(tp=2)
    with pytest.raises(AssertionError, match="pp"):
        mesh.group(0, "pp")
    with pytest.raises(AssertionError):
        Mesh({"tp": 2}, range(3))


# Layout.


def test_tp_lies_closest_together_then_cp_dp_and_pp():
    mesh = arrange(Layout(tp=2, cp=3, dp=5, pp=7), {}, COLOCATED, 0).mesh
    assert [mesh.rank(tp=1), mesh.rank(cp=1), mesh.rank(domain=1), mesh.rank(pp=1)] == [1, 2, 6, 30]
    assert mesh.rank() == 0


@pytest.mark.parametrize("axis", [*AXES, "ep"])
def test_an_axis_without_ranks_is_refused_by_name(axis):
    with pytest.raises(LayoutError, match=f"layout.llm.{axis}=0"):
        Layout(**{axis: 0})


def test_experts_must_divide_the_ranks_of_a_stage():
    assert Layout(tp=2, dp=3, pp=5, ep=6).world == 30
    with pytest.raises(LayoutError, match=r"layout.llm.ep=4 does not divide the 6 .*: 3 is the nearest"):
        Layout(tp=2, dp=3, pp=5, ep=4)


@pytest.mark.parametrize(
    "size, totals, nearest",
    [(3, (8,), 2), (5, (12,), 4), (7, (8, 12), 4), (9, (7,), 7), (3, (1,), 1)],
)
def test_of_two_divisors_as_near_the_smaller_is_the_nearest(size, totals, nearest):
    assert nearest_divisor(size, *totals) == nearest


@pytest.mark.parametrize(
    "placement, beside, sizes, tp, nearest",
    [
        (STAGE0, 0, {"tp": 2, "pp": 2}, 4, 2),
        (STAGE0, 0, {"cp": 3, "pp": 2}, 6, 3),
        (COLOCATED, 0, {"dp": 3}, 4, 1),
        (DISAGGREGATED, 3, {"pp": 2}, 2, 1),
    ],
)
def test_encoders_that_a_placement_has_no_ranks_for_are_refused_with_the_nearest(
    placement, beside, sizes, tp, nearest
):
    key = "layout.encoders.image.tp"
    said = f"{key}={tp}: placement.policy={placement.name}: .*: {key}={nearest} is the nearest"
    with pytest.raises(LayoutError, match=said):
        arrange(Layout(**sizes), {"image": tp}, placement, beside)
    arrange(Layout(**sizes), {"image": nearest}, placement, beside)


def test_a_layout_is_described_by_the_axes_that_split_it():
    assert Layout(dp=2, pp=2).describe() == "dp2·pp2"
    assert Layout(tp=2, cp=3, ep=6).describe() == "tp2·cp3·ep6"
    assert Layout().describe() == "single"


# Arrangement.


def try_arrange(*arguments) -> Arrangement | None:
    try:
        return arrange(*arguments)
    except LayoutError:
        return None


@st.composite
def arrangements(draw) -> Arrangement:
    llm = draw(layouts)
    divisors = [k for k in range(1, llm.world // llm.pp + 1) if llm.world // llm.pp % k == 0]
    llm = Layout(llm.tp, llm.cp, llm.dp, llm.pp, draw(st.sampled_from(divisors)))
    placement = draw(st.sampled_from(PLACEMENTS))
    encoders = {name: draw(st.sampled_from([1, 1, 2, 3, 4])) for name in draw(st.sets(st.sampled_from("xy")))}
    ranks = draw(st.integers(1, 12)) if placement.beside else 0
    divisors = [k for k in range(1, llm.dp + 1) if llm.dp % k == 0]
    made = try_arrange(llm, encoders, placement, ranks, draw(st.sampled_from(divisors)))
    return made or arrange(llm, {"x": 1}, COLOCATED, 0)


@settings(deadline=None, max_examples=200)
@given(arrangements())
def test_domains_partition_the_world(world):
    domains = [world.global_ranks(domain) for domain in range(world.num_domains)]
    assert sorted(rank for of in domains for rank in of) == list(range(world.world))
    for number, ranks in enumerate(domains):
        assert len(ranks) == world.domain_size == world.llm_size + world.encoder_ranks // world.num_domains
        assert {world.domain(rank) for rank in ranks} == {number}
        inside = [world.mesh.coordinates(rank) for rank in ranks[: world.llm_size]]
        order = [(at["pp"], at["replica"], at["cp"], at["tp"]) for at in inside]
        assert order == sorted(order), "stage by stage, member by member"
        assert all(rank >= world.llm.world for rank in ranks[world.llm_size :])


@settings(deadline=None, max_examples=200)
@given(arrangements())
def test_domain_ranks_of_a_stage_are_cp_ranks_of_tp_ranks(world):
    assert world.stage_size == world.llm.tp * world.pool
    assert world.pool == world.llm.cp * world.replicas
    assert world.num_domains * world.replicas == world.llm.dp
    for domain in range(world.num_domains):
        ranks = world.global_ranks(domain)
        for stage in range(world.llm.pp):
            of_stage = ranks[stage * world.stage_size : (stage + 1) * world.stage_size]
            assert of_stage == world.mesh.group(of_stage[0], "tp", "cp", "replica")
            for cp_rank in range(world.pool):
                tp = of_stage[cp_rank * world.llm.tp : (cp_rank + 1) * world.llm.tp]
                assert tp == world.mesh.group(tp[0], "tp")
        # Neighbours in the pipeline are one stage apart.
        for domain_rank in range(world.llm_size - world.stage_size):
            line = world.mesh.group(ranks[domain_rank], "pp")
            place = line.index(ranks[domain_rank])
            assert line[place + 1] == ranks[domain_rank + world.stage_size]


@settings(deadline=None, max_examples=200)
@given(arrangements())
def test_groups_that_compute_together_lie_inside_a_domain(world):
    for group in world.expert_mesh.groups("ep"):
        assert len({world.domain(rank) for rank in group}) == 1
        assert len({world.mesh.coordinates(rank)["pp"] for rank in group}) == 1
    assert len(world.expert_mesh.groups("ep", "edp")) == world.llm.pp
    for mesh in world.encoder_meshes.values():
        for group in mesh.groups("tp"):
            (domain,) = {world.domain(rank) for rank in group}
            first = world.global_ranks(domain).index(group[0])
            assert world.global_ranks(domain)[first : first + len(group)] == group, "neighbours"


@settings(deadline=None, max_examples=200)
@given(arrangements())
def test_tp_groups_hold_every_rank_of_an_encoder_once(world):
    expected = {
        "colocated": range(world.llm_size),
        "stage0": range(world.stage_size),
        "disaggregated": range(world.llm_size, world.domain_size),
    }[world.placement]
    for name, tp in world.encoder_tp.items():
        tp_groups = world.tp_groups(name)
        assert [domain_rank for tp_group in tp_groups for domain_rank in tp_group] == list(expected)
        assert {len(tp_group) for tp_group in tp_groups} == {tp}
        mesh = world.encoder_meshes[name]
        assert len(mesh.ranks) == len(expected) * world.num_domains
        for domain in range(world.num_domains):
            ranks = world.global_ranks(domain)
            for number, tp_group in enumerate(tp_groups):
                for t, domain_rank in enumerate(tp_group):
                    at = mesh.coordinates(ranks[domain_rank])
                    assert at == {
                        "tp": t,
                        "slot": number,
                        "domain": domain,
                        "dp": domain * len(tp_groups) + number,
                    }


def brute_force_replicas(llm, encoder_tp, placement, encoder_ranks, least) -> tuple[bool, int] | None:
    """Whether tp groups lie inside stages, and the replicas of a domain: the first choice that fits."""
    choices = []
    for inside, k in product((True, False), range(least, llm.dp + 1)):
        stage = llm.tp * llm.cp * k
        if llm.dp % k or stage % llm.ep:
            continue
        domains = llm.dp // k
        if placement is DISAGGREGATED:
            if encoder_ranks % domains or not inside:
                continue
            homes = [encoder_ranks // domains]
        elif placement is STAGE0:
            homes = [stage]
        else:
            homes = [stage] * llm.pp if inside else [stage * llm.pp]
        if all(home % tp == 0 for home in homes for tp in encoder_tp.values()):
            choices.append((not inside, k))
    if not choices:
        return None
    crosses, k = min(choices)
    return not crosses, k


@settings(deadline=None, max_examples=300)
@given(st.data(), layouts, st.sampled_from(PLACEMENTS))
def test_domains_are_the_smallest_that_hold_every_group(data, llm, placement):
    encoder_tp = {name: data.draw(st.integers(1, 6)) for name in data.draw(st.sets(st.sampled_from("xy")))}
    ranks = data.draw(st.integers(1, 12)) if placement.beside else 0
    least = data.draw(st.sampled_from([k for k in range(1, llm.dp + 1) if llm.dp % k == 0]))
    made = try_arrange(llm, encoder_tp, placement, ranks, least)
    expected = brute_force_replicas(llm, encoder_tp, placement, ranks, least)
    assert (made is None) == (expected is None)
    if made is not None:
        inside, replicas = expected
        assert made.replicas == replicas
        if placement is COLOCATED and inside:
            for name in encoder_tp:
                for tp_group in made.tp_groups(name):
                    assert len({domain_rank // made.stage_size for domain_rank in tp_group}) == 1


def test_data_parallel_replicas_plan_alone_unless_they_share():
    assert arrange(Layout(dp=4), {"x": 1}, COLOCATED, 0).num_domains == 4
    assert arrange(Layout(dp=4), {"x": 2}, COLOCATED, 0).num_domains == 2
    assert arrange(Layout(dp=4, tp=2), {"x": 2}, COLOCATED, 0).num_domains == 4
    assert arrange(Layout(dp=4, ep=4), {}, COLOCATED, 0).num_domains == 1
    assert arrange(Layout(dp=4), {"x": 1}, COLOCATED, 0, replicas=2).num_domains == 2
    # Across the stages only where no stage holds a tp group.
    assert arrange(Layout(dp=1, pp=2), {"x": 2}, COLOCATED, 0).tp_groups("x") == ((0, 1),)
    assert arrange(Layout(dp=2, pp=2), {"x": 2}, COLOCATED, 0).tp_groups("x") == ((0, 1), (2, 3))


def test_encoders_beside_the_llm_stand_in_any_ratio():
    three = arrange(Layout(dp=2), {"x": 1}, DISAGGREGATED, 3)
    assert (three.world, three.num_domains) == (5, 1)
    assert three.global_ranks(0) == (0, 1, 2, 3, 4)
    assert three.tp_groups("x") == ((2,), (3,), (4,))
    four = arrange(Layout(dp=2, tp=2), {"x": 2}, DISAGGREGATED, 4)
    assert (four.world, four.num_domains) == (8, 2)
    assert four.global_ranks(1) == (2, 3, 6, 7)
    assert four.encoder_meshes["x"].groups("tp") == ((4, 5), (6, 7))
    one = arrange(Layout(dp=3), {"x": 1}, DISAGGREGATED, 1)
    assert one.num_domains == 1
    assert one.encoder_meshes["x"].ranks == (3,)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((Layout(), {}, DISAGGREGATED, 0), ["placement.policy=disaggregated", "placement.ranks=0"]),
        ((Layout(), {}, STAGE0, 2), ["placement.policy=stage0", "placement.ranks=2"]),
        ((Layout(), {"x": 0}, COLOCATED, 0), ["layout.encoders.x.tp=0", "at least one"]),
        ((Layout(dp=3), {"x": 2}, COLOCATED, 0), ["layout.encoders.x.tp=2", "dp=3", "choose sizes"]),
        ((Layout(dp=3, pp=2), {"x": 2}, STAGE0, 0), ["layout.encoders.x.tp=2", "dp=3", "choose sizes"]),
        (
            (Layout(), {"x": 2}, DISAGGREGATED, 3),
            ["layout.encoders.x.tp=2", "3 ranks of encoders", "choose"],
        ),
    ],
)
def test_an_arrangement_that_cannot_be_is_refused_with_the_remedy(arguments, words):
    with pytest.raises(LayoutError) as error:
        arrange(*arguments)
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


def test_an_arrangement_is_described_in_one_line():
    assert arrange(Layout(dp=2, pp=2), {"x": 1}, COLOCATED, 0).describe() == "dp2·pp2"
    described = arrange(Layout(dp=2), {"x": 2, "y": 1}, DISAGGREGATED, 4).describe()
    assert described == "dp2, x tp2, 4 ranks for encoders"


def test_sixteen_thousand_ranks():
    llm = Layout(tp=8, cp=2, dp=128, pp=8, ep=64)
    world = arrange(llm, {"x": 8, "y": 2}, COLOCATED, 0)
    assert world.world == 16_384
    assert world.replicas == 4
    meshes = [world.mesh, world.expert_mesh, *world.encoder_meshes.values()]
    rank = 12_345
    for mesh in meshes:
        names = [*mesh.sizes, *mesh.aliases]
        for axes in (c for n in range(1, len(names) + 1) for c in combinations(names, n)):
            group = mesh.group(rank, *axes)
            assert rank in group
            assert len(group) == prod(mesh.sizes[axis] for axis in mesh.axes(axes))
        for axis in names:
            groups = mesh.groups(axis)
            assert Counter(map(len, groups)) == {len(groups[0]): world.world // len(groups[0])}
            assert len({rank for group in groups for rank in group}) == world.world
    assert world.global_ranks(world.domain(rank)).index(rank) < world.domain_size
    beside = arrange(llm, {"x": 8}, DISAGGREGATED, 1024)
    assert beside.global_ranks(beside.num_domains - 1)[-1] == beside.world - 1 == 17_407


# Layers over stages.


@given(st.integers(0, 1000), st.integers(1, 40))
def test_a_number_is_split_evenly_larger_parts_first(total, parts):
    shares = split_evenly(total, parts)
    assert len(shares) == parts
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)


@given(st.integers(1, 16), st.integers(0, 30))
def test_equal_layers_are_shared_evenly_and_the_first_stages_take_the_rest(stages, more):
    assert stage_layers(tuple([7] * (stages + more)), 0, stages) == split_evenly(stages + more, stages)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(0, 30), st.integers(1, 5))
def test_the_costliest_stage_costs_least_then_costs_are_most_even(costs, last, stages):
    if len(costs) < stages:
        return
    found = stage_layers(tuple(costs), last, stages)

    def times(counts: tuple[int, ...]) -> list[int]:
        starts = [sum(counts[:stage]) for stage in range(stages + 1)]
        return [sum(costs[a:b]) + last * (b == len(costs)) for a, b in pairwise(starts)]

    cuts = combinations(range(1, len(costs)), stages - 1)
    ways = [tuple(b - a for a, b in pairwise([0, *cut, len(costs)])) for cut in cuts]
    assert found in ways
    best = min((max(times(way)), sum(t * t for t in times(way))) for way in ways)
    assert (max(times(found)), sum(t * t for t in times(found))) == best


def test_a_costly_output_layer_takes_layers_from_the_last_stage():
    assert stage_layers(tuple([10] * 8), 0, 2) == (4, 4)
    assert stage_layers(tuple([10] * 8), 20, 2) == (5, 3)
    assert stage_layers(tuple([10] * 8), 1000, 2) == (7, 1)


def test_a_stage_without_a_layer_is_refused_with_the_remedy():
    with pytest.raises(LayoutError, match=r"pp=5 .* choose pp at most 4"):
        stage_layers(tuple([1] * 4), 0, 5)


def test_least_common_domains_hold_every_encoder():
    """TP groups of 4 and 6 ranks side by side in domains of 12."""
    world = arrange(Layout(dp=24), {"x": 4, "y": 6}, COLOCATED, 0)
    assert world.domain_size == lcm(4, 6)
    assert [len(world.tp_groups(name)) for name in ("x", "y")] == [3, 2]
