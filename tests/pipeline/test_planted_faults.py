"""Every fault that is planted into random domains is refused by its rule, and says who is meant."""

from functools import cache
from random import Random

import pytest
from domain_plans import BUILDERS, one
from faults import ORDERS
from faults_of_work import WORK
from random_domains import random_domain
from wide_plans import random_wide_plan

from pipeline.plan import StepPlan
from pipeline.verifier import violations

FAULTS = {**ORDERS, **WORK}
EACH, LEAST = 30, 10  # domains that a fault is planted into


@cache
def safe_plans() -> list[StepPlan]:
    """Domains under every schedule, and some with what schedules may do that ours do not."""
    policies = list(BUILDERS.values())
    plans = [random_domain(Random(n), policies[n % len(policies)])[0] for n in range(140)]
    plans += [random_wide_plan(Random(n)) for n in range(60)]
    return Random(0).sample(plans, len(plans))


def test_the_plans_without_faults_are_safe():
    assert [found for plan in safe_plans() if (found := list(violations(plan, one)))] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused_by_its_rule(fault):
    planted = 0
    for number, plan in enumerate(safe_plans()):
        if planted == EACH:
            break
        wrong = FAULTS[fault](plan, Random(number))
        if wrong is not None:
            planted += 1
            found = list(violations(wrong.plan, one))
            assert wrong.found(found), (number, wrong.rule, wrong.words, found)
    assert planted >= LEAST
