import os
import pickle
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from random import Random

import pytest
from domain_plans import Shape, Work, make_plan

from parallel.tiles import Tile
from pipeline.plan import Kind, Op, StepPlan, diff

HERE = Path(__file__).parent


def a_plan() -> StepPlan:
    """Two domains of two stages with two members of two ranks, and a rank beside them."""
    work = [
        Work("image", 0, (2, 3), (2, 1)),
        Work("audio", 1, (8,), (3,)),
        Work("image", 1, (0, 1, 2, 3), (2, 3), slots=2),
    ]
    shape = Shape(stages=2, pool=2, tp=2, party=2, beside=1, homes=((8, 9), (0, 4)))
    plan = make_plan(shape, 3, work, "encode_first", frozen=("audio",), domains=2, cuts=Random(1))
    batch = plan.domain.microbatches[0]
    tiled = replace(batch, tiles=((Tile(0, 0, 2, 0, 3), Tile(1, 0, 2, 3, 2)), ()))
    first = set_at(plan.domain, ["microbatches", 0], tiled)
    first = set_at(first, ["chunks", 2, "tiles", 1], (Tile(1, 0, 1, 0, 8),))
    return replace(plan, skipped=(("text", 9),), cursor=5, next_cursor=9, domains=(first, plan.domains[1]))


def leaves(value, path="plan"):
    """Every leaf of a plan with its path."""
    if is_dataclass(value):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, tuple):
        for i, entry in enumerate(value):
            yield from leaves(entry, f"{path}[{i}]")
    else:
        yield path, value


def changed_leaf(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, Kind):
        return next(kind for kind in Kind if kind is not value)
    if isinstance(value, str):
        return value + "x"
    return 0 if value is None else value + 1


def set_at(value, path: list, new):
    """A copy of a plan with one leaf replaced, without the checks of its parts."""
    if not path:
        return new
    key, *rest = path
    if isinstance(key, int):
        return (*value[:key], set_at(value[key], rest, new), *value[key + 1 :])
    # The invariants of a layout are tested elsewhere; here it only has to be another one.
    copy = object.__new__(type(value))
    copy.__dict__.update({field.name: getattr(value, field.name) for field in fields(value)})
    copy.__dict__[key] = set_at(getattr(value, key), rest, new)
    return copy


def keys(path: str) -> list:
    parts = path.removeprefix("plan").replace("[", ".[").split(".")[1:]
    return [int(part[1:-1]) if part.startswith("[") else part for part in parts]


def test_a_plan_holds_nothing_but_plain_immutable_values():
    for path, value in leaves(a_plan()):
        assert value is None or type(value) in (int, str, bool, Kind), (path, value)


def test_equal_plans_have_equal_digests():
    one, other = a_plan(), a_plan()
    assert one is not other
    assert one == other
    assert one.digest == other.digest
    assert pickle.loads(pickle.dumps(one)).digest == other.digest


def test_a_digest_has_63_bits():
    digests = [replace(a_plan(), step=step).digest for step in range(200)]
    assert len(set(digests)) == 200
    assert 2**60 < max(digests) < 2**63
    assert min(digests) >= 0


def test_every_value_changes_the_digest_and_the_difference_names_its_path():
    plan = a_plan()
    seen = {plan.digest}
    paths = [path for path, _ in leaves(plan)]
    assert len(paths) > 1000
    for path, value in leaves(plan):
        other = set_at(plan, keys(path), changed_leaf(value))
        assert other.digest not in seen, path
        seen.add(other.digest)
        found = diff(plan, other)
        assert len(found) == 1
        assert found[0].startswith(f"{path}: ")


@pytest.mark.parametrize("field", [field.name for field in fields(StepPlan)])
def test_every_field_of_the_step_changes_the_digest(field):
    plan = a_plan()
    value = getattr(plan, field)
    other = replace(plan, **{field: value[:-1] if isinstance(value, tuple) else changed_leaf(value)})
    assert other.digest != plan.digest
    assert all(line.startswith(f"plan.{field}: ") for line in diff(plan, other))
    assert diff(plan, other)


def test_plans_without_differences_have_none():
    assert diff(a_plan(), a_plan()) == []


def test_a_difference_tells_both_values():
    plan = a_plan()
    other = set_at(plan, ["domains", 0, "chunks", 2, "ranks", 1], 5)
    assert diff(plan, other) == ["plan.domain.chunks[2].ranks[1]: 1 != 5"]


def test_a_longer_list_is_named_with_its_first_change():
    plan = a_plan()
    ops = plan.domain.ops
    longer = set_at(plan, ["domains", 0, "ops", 1], (Op(Kind.ENCODE, 7), *ops[1]))
    found = diff(plan, longer)
    assert found[0] == f"plan.domain.ops[1]: {len(ops[1])} entries != {len(ops[1]) + 1}"
    assert found[1].startswith("plan.domain.ops[1][0].kind: ")


def test_values_of_another_type_and_long_values_are_told_in_short():
    plan = a_plan()
    found = diff(plan, set_at(plan, ["domains", 0, "routes", 0], None))
    assert len(found) == 1
    assert found[0].startswith("plan.domain.routes[0]: Route(")
    assert found[0].endswith("... != None")
    assert len(found[0]) < 200


@pytest.mark.parametrize("hash_seed", ["1", "4242"])
def test_the_digest_is_the_same_in_another_process(hash_seed):
    code = "import test_plans; print(test_plans.a_plan().digest)"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parents[1]), *sys.path])
    answer = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert int(answer.stdout) == a_plan().digest


def test_ops_read_well():
    assert str(Op(Kind.FORWARD, 3)) == "forward(3)"
    assert str(Op(Kind.WAIT, 3, Kind.SHIP)) == "wait(ship 3)"
