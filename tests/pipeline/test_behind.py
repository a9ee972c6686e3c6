"""Reductions spread over the layers of a backward: in order, evenly, and none before it is complete."""

from collections.abc import Callable
from random import Random

from pipeline.behind import Behind


class Noted:
    """A reduction of buckets of so many elements each; `begun` of them have begun, and all reductions note
    their number in one `order`.
    """

    def __init__(self, number: int, sizes: list[int], order: list[int]) -> None:
        self.number, self.sizes, self.order = number, sizes, order
        self.begun, self.behind = 0, list[int]()

    @property
    def elements(self) -> int:
        return sum(self.sizes)

    def begin(self) -> Callable[[], None]:
        raise AssertionError("that is the REDUCE's")

    def begin_behind(self, layer: int) -> None:
        self.behind.append(layer)

    def begin_first(self, elements: int) -> None:
        while self.begun < len(self.sizes) and sum(self.sizes[: self.begun]) < elements:
            self.begun += 1
            self.order.append(self.number)


def test_buckets_go_in_order_and_evenly() -> None:
    for number in range(300):
        random, order = Random(number), list[int]()
        sizes = [
            [random.randint(1, 9) for _ in range(random.randint(1, 12))] for _ in range(random.randint(1, 4))
        ]
        noted = [Noted(at, each, order) for at, each in enumerate(sizes)]
        grows = random.random() < 0.5
        complete = noted[:-1] if grows else noted
        behind, layers = Behind(noted, last_grows=grows), random.randint(1, 12)
        total = sum(each.elements for each in noted)
        for layer in reversed(range(layers)):
            behind.left(layer, layers)
            assert order == sorted(order)
            begun = sum(sum(each.sizes[: each.begun]) for each in complete)
            due = min(total * (layers - layer) // layers, sum(each.elements for each in complete))
            largest = max(map(max, sizes))
            assert due <= begun < due + largest
            if grows and layer in noted[-1].behind:
                assert all(each.begun == len(each.sizes) for each in complete)
        assert all(each.begun == len(each.sizes) for each in complete)
        # The last bucket of what is complete never waits for more than what still grows is worth.
        assert not grows or noted[-1].behind[-1] == 0


def test_what_still_grows_follows_its_layers_once_all_else_has_begun() -> None:
    order = list[int]()
    llm, image = Noted(0, [10] * 6, order), Noted(1, [10] * 2, order)
    behind = Behind([llm, image], last_grows=True)
    for layer in reversed(range(8)):
        behind.left(layer, 8)
    assert llm.begun == 6
    assert image.behind == [2, 1, 0]
