"""Ranks filled one after the other: with what is poured, or with all tokens where memory is short."""

from collections.abc import Mapping, Sequence

from parallel.policies.pool import Build, Pool, no_room


def filled(lengths: Sequence[int], rows: Sequence[Sequence[int]], pool: Pool) -> Build:
    """Ranks filled with tokens one after the other: where memory leaves no choice, it is this or nothing.

    Raises:
        ValueError: if there are more units than room.
    """
    assert pool.tokens_per_rank is not None, "without a limit, all sequences find room"
    units = {number: -(-length // pool.unit) for number, length in enumerate(lengths)}
    build = Build(lengths, rows, pool)
    rooms = [pool.tokens_per_rank // pool.unit] * pool.num_cp_ranks
    for number, parts in fill(units, rooms, pool.nodes).items():
        build.pour(number, parts)
    if not build.fits:
        raise no_room(lengths, pool)
    return build


def fill(
    amounts: Mapping[int, int], rooms: Sequence[int], nodes: Sequence[Sequence[int]] = ()
) -> dict[int, list[tuple[int, int]]]:
    """Pour amounts into the ranks' rooms, the largest room first, going on in the next where one is full: the
    wrap-around rule (McNaughton, 1959). Returns (rank, amount) of each; a surplus goes to the last rank.

    Of several `nodes`, each its ranks, an amount goes to the one with the least room that has enough, else to
    one after the other from the one with the most. Ranks are filled as full, whichever the nodes.
    """
    free = list(rooms)
    orders = [sorted(node, key=lambda rank: -rooms[rank]) for node in nodes or [range(len(rooms))]]
    parts: dict[int, list[tuple[int, int]]] = {}
    for number, amount in amounts.items():
        left = amount
        room_of = [sum(max(0, free[rank]) for rank in order) for order in orders]
        by_room = sorted(range(len(orders)), key=lambda node: (room_of[node] < left, room_of[node]))
        if room_of[by_room[0]] < left:
            by_room.reverse()
        ranks = [rank for node in by_room for rank in orders[node]]
        own: dict[int, int] = {}
        for rank in ranks:
            take = min(left, free[rank])
            if take > 0:
                own[rank] = take
                left -= take
        if left:
            last = min(range(len(rooms)), key=lambda rank: (rooms[rank], -rank))
            own[last] = own.get(last, 0) + left
        for rank, take in own.items():
            free[rank] -= take
        parts[number] = list(own.items()) or [(ranks[0], 1)]
    return parts
