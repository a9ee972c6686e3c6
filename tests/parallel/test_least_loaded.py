"""Placing costs one by one, against its definition."""

from hypothesis import given
from hypothesis import strategies as st

from parallel.least_loaded import place

bins = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), min_size=1, max_size=8)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=30), bins)
def test_each_cost_goes_to_the_least_loaded_bin_with_room(items, bins):
    loads, rooms = [load for load, _ in bins], [room for _, room in bins]
    plain: list[int] | None = []
    own_loads, own_rooms = list(loads), list(rooms)
    for cost, size in items:
        with_room = [number for number, room in enumerate(own_rooms) if room >= size]
        if not with_room:
            plain = None
            break
        number = min(with_room, key=own_loads.__getitem__)
        own_loads[number] += cost
        own_rooms[number] -= size
        plain.append(number)
    assert place([cost for cost, _ in items], loads, [size for _, size in items], rooms) == plain
    if plain is not None:
        assert (loads, rooms) == (own_loads, own_rooms)
