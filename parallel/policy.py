"""How a policy joins the platform: an object with a name, found by an entry point of an installed package.

A policy decides one thing about a plan: which replica takes which sample, or how rows travel. It is a frozen
object of its kind, a subclass of `Policy`: its name, the facts that the planner must know about it, and one
pure function. Ours and those of other packages are registered alike:

    [project.entry-points."omni.balance"]
    snake = "mypackage.policies:SNAKE"

Nothing else in the platform knows the name of a policy: the planner asks for its facts. Packages are listed
from their metadata alone; only the one whose policy is chosen is imported.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from parallel.installed import installed


class PolicyError(ValueError):
    """A policy that is not there, is none of its kind, or breaks what its kind promises."""


@dataclass(frozen=True)
class Policy:
    """What all kinds share: the `name` by which it is registered and chosen, and `decide`, its function.

    `decide` is pure: no clock, no random numbers, no torch, nothing that depends on the rank or the order of
    a set, since every rank calls it with the same arguments and must get the same answer. Users of a policy
    call the policy itself, which passes on to `decide` and checks that the answer keeps the kind's promise.
    """

    group: ClassVar[str]
    """The entry points that register policies of this kind, such as "omni.balance"."""

    name: str
    decide: Callable[..., Any]
    key: str = field(default="", kw_only=True, compare=False)
    """Where a configuration chose it, such as "balance.policy"; empty for one that nobody chose by name."""

    def __str__(self) -> str:
        return f"the policy {self.key}={self.name}" if self.key else f"the policy {self.name} ({self.group})"

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Have what its functions raise inside the block say whose they are.

        Raises:
            PolicyError: naming the policy, the error and the line that raised it.
        """
        try:
            yield
        except PolicyError:
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise PolicyError(
                f"{self} raised {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
            ) from error

    def require(self, kept: bool, promise: str) -> None:
        """Refuse an answer that breaks a promise.

        Raises:
            PolicyError: naming the policy and what it should have promised.
        """
        if not kept:
            raise PolicyError(f"{self} broke its promise: {promise} (docs/policies.md)")


PolicyKind = TypeVar("PolicyKind", bound=Policy)


def registered(group: str) -> list[str]:
    """Return the names of all policies that installed packages register in a group of entry points."""
    return sorted({point.name for point in installed(group)})


def find(kind: type[PolicyKind], name: str, key: str) -> PolicyKind:
    """Import the policy of `kind` that is registered as `name`; `key` is where a user chose it.

    Raises:
        PolicyError: if there is none, if several packages register the name, if it cannot be imported or is
            no policy of this kind; the message names the key, the value and the remedy.
    """
    points = [point for point in installed(kind.group) if point.name == name]
    if not points:
        raise PolicyError(
            f"{key}={name}: choose one of {', '.join(registered(kind.group)) or 'none that is installed'}; "
            f"{how_to_add(kind.group)}"
        )
    if len(points) > 1:
        packages = ", ".join(sorted(point.dist.name if point.dist else "?" for point in points))
        raise PolicyError(f"{key}={name}: several packages register this name ({packages}): keep one")
    (point,) = points
    try:
        policy = point.load()
    except (ImportError, AttributeError) as error:
        raise PolicyError(
            f"{key}={name}: {point.value}, registered in {kind.group}, cannot be imported: {error}"
        ) from error
    if not isinstance(policy, kind):
        raise PolicyError(
            f"{key}={name}: {point.value}, registered in {kind.group}, is {type(policy).__name__}, not a "
            f"{kind.__name__}: register an object of this class (docs/policies.md)"
        )
    if policy.name != name:
        raise PolicyError(
            f"{key}={name}: {point.value} is named {policy.name}: register it in {kind.group} by that name"
        )
    return replace(policy, key=key)


def how_to_add(group: str) -> str:
    """Say in half a sentence how a package adds a policy to a group of entry points."""
    return f"a package adds its own under the entry point {group} (docs/policies.md)"
