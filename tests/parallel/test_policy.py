"""Policies are found by entry point: ours, and those of a package that a test writes."""

from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
from own_policies import PYPROJECT, entry_points_of, own
from packages import install
from samples import bins_of, samples_of

from dataloader.balance import BalancePolicy
from dataloader.dealing import DealPolicy
from dataloader.packing import PackingPolicy
from dataloader.pairing import PairingPolicy
from omni.policies import KINDS
from parallel.cluster import Link, Links
from parallel.placements import DomainSizes, PlacementPolicy
from parallel.policies import SharingPolicy, make_pool
from parallel.policy import PolicyError, find, registered
from parallel.schemes import SequenceCost
from parallel.sequence import SequenceLayout
from parallel.tiles import AttentionShape
from parallel.transport_policies import TransportPolicy
from pipeline.builders import SchedulePolicy

MODULE = """
from omni.policies import BalancePolicy, PackingPolicy
MINE = BalancePolicy("mine", lambda samples, bins: (bins.count - 1,) * len(samples))
OTHER = PackingPolicy("other", lambda samples, budget: ())
def function(samples, bins): return ()
"""


@pytest.mark.parametrize("kind", dict.fromkeys(section.kind for section in KINDS))
def test_what_is_installed_is_what_the_project_registers(kind):
    """A stale installation fails here, and says so: `make` installs anew when pyproject.toml changes."""
    installed = {point.name: point.value for point in entry_points(group=kind.group)}
    assert installed.items() >= entry_points_of(PYPROJECT, kind.group).items()
    for name, policy in own(kind).items():
        assert policy.name == name
        assert find(kind, name, "key") == policy


def test_a_policy_of_another_package_is_found_without_importing_the_others(tmp_path: Path, monkeypatch):
    mine = 'mine = "mine_found:MINE"\nbroken = "mine_nowhere:X"'
    install(tmp_path, monkeypatch, "mine_found", MODULE, {"omni.balance": mine})
    assert {"broken", "mine", *own(BalancePolicy)} <= set(registered("omni.balance"))
    assert find(BalancePolicy, "mine", "balance.policy")(samples_of([5, 6]), bins_of(3)) == (2, 2)


@pytest.mark.parametrize(
    "name, words",
    [
        ("foo", ["balance.policy=foo: choose one of", "lpt", "none", "mine", "entry point omni.balance"]),
        ("broken", ["balance.policy=broken", "nowhere:X", "cannot be imported"]),
        ("missing", ["balance.policy=missing", "mine_bad:MISSING", "cannot be imported"]),
        ("function", ["balance.policy=function", "mine_bad:function", "is function, not a BalancePolicy"]),
        ("other", ["balance.policy=other", "is PackingPolicy, not a BalancePolicy"]),
        ("alias", ["balance.policy=alias", "is named mine", "by that name"]),
        ("lpt", ["balance.policy=lpt", "several packages", "mine-bad", "omni-train"]),
    ],
)
def test_what_cannot_be_chosen_is_refused_with_the_remedy(tmp_path: Path, monkeypatch, name, words):
    points = {
        "mine": "mine_bad:MINE",
        "broken": "nowhere:X",
        "missing": "mine_bad:MISSING",
        "function": "mine_bad:function",
        "other": "mine_bad:OTHER",
        "alias": "mine_bad:MINE",
        "lpt": "mine_bad:MINE",
    }
    lines = "\n".join(f'{key} = "{value}"' for key, value in points.items())
    install(tmp_path, monkeypatch, "mine_bad", MODULE, {"omni.balance": lines})
    with pytest.raises(PolicyError) as refused:
        find(BalancePolicy, name, "balance.policy")
    assert [word for word in words if word not in str(refused.value)] == [], str(refused.value)


LINK = Link(10, 10**9)
POOL = make_pool(SequenceCost(AttentionShape(4, 4), 2, 1000, 10, 16, LINK), 2, unit=4)


@pytest.mark.parametrize(
    "policy, arguments",
    [
        (BalancePolicy("p", lambda samples, bins: (bins.count,)), (samples_of([1]), bins_of(2))),
        (BalancePolicy("p", lambda samples, bins: ()), (samples_of([1]), bins_of(2))),
        (DealPolicy("p", lambda work, sizes: [2]), (np.ones((1, 1), np.int64), [1, 1])),
        (DealPolicy("p", lambda work, sizes: [0, 0]), (np.ones((1, 1), np.int64), [1, 1])),
        (PackingPolicy("p", lambda samples, budget: ((0, 0), (1,))), (samples_of([1, 1]), 4)),
        (PackingPolicy("p", lambda samples, budget: ((0, 1),)), (samples_of([300, 300]), 4)),
        (PackingPolicy("p", lambda samples, budget: ((0,), ())), (samples_of([3]), 4)),
        (PairingPolicy("p", lambda *given: ((0, None),)), ([samples_of([3]), samples_of([3])], 6, 1)),
        (PairingPolicy("p", lambda *given: ((0, 0), (None, None))), ([samples_of([3])] * 2, 6, 1)),
        (PairingPolicy("p", lambda *given: ((1,), (0,)), in_order=True), ([samples_of([3, 3])], 6, 1)),
        (PairingPolicy("p", lambda *given: ((0,),)), ([samples_of([3])] * 2, 6, 1)),
        (PairingPolicy("p", lambda *given: ((0, 0),)), ([samples_of([300]), samples_of([300])], 6, 1)),
        (PlacementPolicy("p", lambda sizes: (0, 9)), (DomainSizes(2, 2, 0),)),
        (PlacementPolicy("p", lambda sizes: (2, 2)), (DomainSizes(2, 2, 0),)),
        (SharingPolicy("p", lambda lengths, pool: SequenceLayout.whole([8], [0], 3)), ([8], POOL)),
        (SharingPolicy("p", lambda lengths, pool: SequenceLayout.whole([7], [0], 2)), ([8], POOL)),
        (SharingPolicy("p", own(SharingPolicy)["all"].decide, cuts=False), ([8], POOL)),
        (TransportPolicy("p", lambda *given: "local"), ({(0, 1): 3}, (0, 0), 8, Links(LINK, LINK))),
        (TransportPolicy("p", lambda *given: "mail"), ({(0, 1): 3}, (0, 0), 8, Links(LINK, LINK))),
    ],
)
def test_an_answer_that_breaks_the_promise_is_refused(policy, arguments):
    with pytest.raises(PolicyError, match=rf"policy p \({policy.group}\) broke its promise"):
        policy(*arguments)


def raising(*given):
    return 1 // 0


@pytest.mark.parametrize("decide", [raising, lambda *given: None])
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (BalancePolicy, (samples_of([1]), bins_of(2))),
        (DealPolicy, (np.ones((1, 1), np.int64), [1, 1])),
        (PackingPolicy, (samples_of([1, 1]), 4)),
        (PairingPolicy, ([samples_of([3])], 6, 1)),
        (PlacementPolicy, (DomainSizes(2, 2, 0),)),
        (SharingPolicy, ([8], POOL)),
        (SchedulePolicy, (None, None)),
    ],
)
def test_a_policy_that_raises_or_answers_nothing_is_named_with_the_line(kind, arguments, decide):
    words = r"^the policy some\.key=p raised (ZeroDivision|Type|Attribute)Error: .* \(.*\.py, line \d+\)$"
    with pytest.raises(PolicyError, match=words) as caught:
        kind("p", decide, key="some.key")(*arguments)
    assert caught.value.__cause__ is not None


def test_a_packing_whose_encode_raises_is_named():
    with pytest.raises(PolicyError, match=r"^the policy p \(omni\.packing\) raised ZeroDivisionError"):
        PackingPolicy("p", raising, encode=raising).encoded_with(samples_of([1]), ((0,),), 4)
