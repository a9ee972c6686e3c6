import os
import pickle
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from random import Random

import pytest
from domain_plans import Shape, Work, make_plan
from wide_plans import with_split_backwards

from parallel.laws import Law, Laws
from parallel.tiles import Tile
from parallel.work import Grad
from pipeline.builders import INTERLEAVED
from pipeline.digest import digest_of
from pipeline.domain_plan import DomainPlan, Point
from pipeline.ops import Kind, Op
from pipeline.plan import StepPlan, diff

HERE = Path(__file__).parent


def a_plan() -> StepPlan:
    """Two stages of two cp ranks with a team of two ranks, and a team beside them, with halves of backwards,
    an encoder batch of two microbatches, an attach point beside the embedding and reductions of virtual
    stages.
    """
    work = [
        Work("image", 0, (2, 3), (2, 1)),
        Work("audio", 1, (8, 9), (3,)),
        Work("image", (0, 1), (0, 1, 2, 3), (2, 3), num_tp_groups=2),
    ]
    taps = (Point("llm.layers.1", 1, 0),)
    shape = Shape(
        2, pool=2, tp=2, collective_group=2, team=2, vpp=2, beside=2, homes=((8, 10), (0, 4)), taps=taps
    )
    builder = with_split_backwards(INTERLEAVED, seed=1)
    plan = make_plan(shape, 2, work, builder, frozen=("audio",), cuts=Random(1))
    batch = plan.domain.microbatches[0]
    tiled = replace(batch, tiles=((Tile(0, 0, 2, 0, 3), Tile(1, 0, 2, 3, 2)), ()), exchange_ns=(3, 4))
    plan = set_at(plan, ["domain", "microbatches", 0], tiled)
    plan = set_at(plan, ["domain", "encoder_batches", 2, "tiles", 1], (Tile(1, 0, 1, 0, 8),))
    plan = set_at(plan, ["domain", "encoder_batches", 2, "exchange_ns"], (5, 6))
    taken = replace(plan.taken, cursor=5, next_cursor=9, skipped=(("text", 9),))
    return replace(plan, taken=taken, number=1)


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
    if isinstance(value, Kind | Grad):
        return next(other for other in type(value) if other is not value)
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
        assert value is None or type(value) in (int, str, bool, Kind, Grad), (path, value)


def test_equal_plans_have_equal_digests():
    one, other = a_plan(), a_plan()
    assert one is not other
    assert one == other
    assert one.digests == other.digests
    assert pickle.loads(pickle.dumps(one)).digests == other.digests


def test_digests_have_63_bits():
    digests = [replace(a_plan(), step=step).digests[0] for step in range(200)]
    assert len(set(digests)) == 200
    assert 2**60 < max(digests) < 2**63
    assert min(digests) >= 0
    assert all(0 <= digest < 2**63 for digest in a_plan().digests)


WORLD, GROUP, DOMAIN = range(3)


def levels_of(path: str) -> set[int]:
    """The levels whose digest tells of a value: one, but for the order of reductions."""
    if path.startswith("plan.domain."):
        return {WORLD, DOMAIN} if path.startswith("plan.domain.reductions") else {DOMAIN}
    if path == "plan.number":
        return set()  # which domain this is differs between the ranks that compare
    return {GROUP} if path.startswith("plan.group.") else {WORLD}


def test_every_value_changes_the_digest_of_its_level_and_the_difference_names_its_path():
    plan = a_plan()
    seen = [{digest} for digest in plan.digests]
    checked = set()
    for path, value in leaves(plan):
        other = set_at(plan, keys(path), changed_leaf(value))
        digests = other.digests
        changed = {level for level in range(3) if digests[level] != plan.digests[level]}
        assert changed == levels_of(path), path
        for level in changed:
            assert digests[level] not in seen[level], path
            seen[level].add(digests[level])
        found = diff(plan, other)
        assert len(found) == 1
        assert found[0].startswith(f"{path}: ")
        checked.add(path)
    assert len(checked) > 1000


@pytest.mark.parametrize("field", [field.name for field in fields(DomainPlan)])
def test_every_field_of_the_domain_changes_its_digest(field):
    plan = a_plan()
    value = getattr(plan.domain, field)
    assert value != ()
    domain = replace(plan.domain, **{field: value[:-1] if isinstance(value, tuple) else changed_leaf(value)})
    other = replace(plan, domain=domain)
    assert other.digests[DOMAIN] != plan.digests[DOMAIN]
    assert (other.digests[WORLD] != plan.digests[WORLD]) == (field == "reductions")
    assert all(line.startswith(f"plan.domain.{field}: ") for line in diff(plan, other))
    assert diff(plan, other)


@pytest.mark.parametrize("field", [f.name for f in fields(StepPlan) if f.name not in ("number", "domain")])
def test_every_field_of_the_step_changes_the_digest_of_its_level(field):
    plan = a_plan()
    value = getattr(plan, field)
    if field == "taken":
        changed = replace(value, skipped=())
    elif field == "group":
        changed = replace(value, replicas=())
    elif field == "learnt":
        law = Law(1, 2, 3)
        changed = (("image", Laws(law, law, law)),)
    else:
        changed = value[:-1] if isinstance(value, tuple) else changed_leaf(value)
    other = replace(plan, **{field: changed})
    level = GROUP if field == "group" else WORLD
    assert [a != b for a, b in zip(plan.digests, other.digests, strict=True)] == [
        n == level for n in range(3)
    ]
    assert all(line.startswith(f"plan.{field}") for line in diff(plan, other))
    assert diff(plan, other)


def test_where_one_tuple_ends_and_the_next_begins_is_hashed():
    values = [((1, 2), (3,)), ((1,), (2, 3)), (1, 2, 3), ((1, 2, 3),), ((1, 2, 3), ()), ((), (1, 2, 3))]
    values += [("ab", "c"), ("a", "bc"), ("abc",), (None,), (0,), (False, False), ("",), ("0",), "0", None]
    digests = [digest_of(value) for value in values]
    assert len(set(digests)) == len(values)


def test_objects_that_are_shared_are_hashed_as_those_that_are_not():
    def op() -> Op:
        return Op(Kind.BACKWARD, 3, virtual_stage=1, grad=Grad.WEIGHT)

    shared = op()
    assert digest_of((shared, shared, (shared,))) == digest_of((op(), op(), (op(),)))
    assert digest_of((shared, shared)) != digest_of((shared,))


def test_what_a_plan_may_not_hold_has_no_digest():
    for value in (1.5, [1], {1: 2}, frozenset({1}), object()):
        with pytest.raises(TypeError):
            digest_of((1, value))


def test_plans_without_differences_have_none():
    assert diff(a_plan(), a_plan()) == []


def test_a_difference_tells_both_values():
    plan = a_plan()
    other = set_at(plan, ["domain", "encoder_batches", 2, "ranks", 1], 5)
    assert diff(plan, other) == ["plan.domain.encoder_batches[2].ranks[1]: 1 != 5"]


def test_a_longer_list_is_named_with_its_first_change():
    plan = a_plan()
    ops = plan.domain.ops
    longer = set_at(plan, ["domain", "ops", 1], (Op(Kind.ENCODE, 7), *ops[1]))
    found = diff(plan, longer)
    assert found[0] == f"plan.domain.ops[1]: {len(ops[1])} entries != {len(ops[1]) + 1}"
    assert found[1].startswith("plan.domain.ops[1][0].kind: ")


def test_values_of_another_type_and_long_values_are_told_in_short():
    plan = a_plan()
    found = diff(plan, set_at(plan, ["domain", "routes", 0], None))
    assert len(found) == 1
    assert found[0].startswith("plan.domain.routes[0]: Route(")
    assert found[0].endswith("... != None")
    assert len(found[0]) < 200


@pytest.mark.parametrize("hash_seed", ["1", "4242"])
def test_the_digest_is_the_same_in_another_process(hash_seed):
    code = "import test_plans; print(*test_plans.a_plan().digests)"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parents[1]), *sys.path])
    answer = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert tuple(map(int, answer.stdout.split())) == a_plan().digests


def test_ops_read_well():
    assert str(Op(Kind.FORWARD, 3)) == "forward(3)"
    assert str(Op(Kind.WAIT, 3, Kind.SHIP)) == "wait(ship 3)"
    assert (
        str(Op(Kind.WAIT, 3, Kind.RECV_FORWARD, virtual_stage=2)) == "wait(recv_forward 3, virtual stage 2)"
    )
    assert (
        str(Op(Kind.BACKWARD, 3, virtual_stage=2, grad=Grad.WEIGHT)) == "backward(3, virtual stage 2, weight)"
    )
