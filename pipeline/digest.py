"""Digests of plans: equal plans hash alike on every rank, machine and Python, without a text of everything.

A plan is nested tuples and frozen dataclasses of integers, booleans, strings and None. Its values are written
one after the other into one array of 64-bit integers, with the length of every tuple and the name of
every class, so that different plans make different arrays; the array is hashed. What a tuple holds of one
class is written field by field, as columns, and a tuple of tuples as their lengths and what they hold: a plan
of thousands of ops is a few long columns.
"""

import sys
from array import array
from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from functools import cache
from hashlib import blake2b
from itertools import chain
from operator import attrgetter
from typing import Any

_NONE, _TUPLE, _TEXT, _NUMBERS, _TUPLES, _MIXED = range(-(2**62), -(2**62) + 6)


def digest_of(value: Any) -> int:
    """Return a 63-bit hash of nested tuples and dataclasses of int, bool, str and None.

    Raises:
        TypeError: for anything else, and for integers beyond 64 bits.
    """
    writer = _Writer()
    writer.write(value)
    out = writer.out
    if sys.byteorder == "big":
        out.byteswap()
    return int.from_bytes(blake2b(out.tobytes(), digest_size=8).digest(), "little") >> 1


@cache
def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


@cache
def _fields(kind: Hashable) -> tuple[int, tuple[str, ...]]:
    """The number of a class's name, and its fields in order."""
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise TypeError(f"a plan holds a {kind}, which has no digest")
    return _number(kind.__name__), tuple(field.name for field in fields(kind))


class _Texts(dict[str | None, int]):
    """The numbers of texts, each found once, and of None."""

    def __missing__(self, text: str | None) -> int:
        number = self[text] = _NONE if text is None else _number(str(text))
        return number


class _Writer:
    """Writes values into `out`."""

    def __init__(self) -> None:
        self.out = array("q")
        self.texts = _Texts()

    def write(self, value: Any) -> None:
        kind: Any = type(value)
        if kind is int or kind is bool:
            self.out.append(value)
        elif kind is tuple:
            self.out.append(_TUPLE)
            self.out.append(len(value))
            if value:
                self.write_all(value)
        elif value is None:
            self.out.append(_NONE)
        elif isinstance(value, str):
            self.out.append(_TEXT)
            self.out.append(self.texts[value])
        else:
            number, names = _fields(kind)
            self.out.append(number)
            for name in names:
                self.write(getattr(value, name))

    def write_all(self, values: tuple[Any, ...]) -> None:
        """Write what a tuple holds."""
        out, kinds = self.out, set(map(type, values))
        kind: Any = next(iter(kinds))
        if kinds <= {int, bool}:
            out.append(_NUMBERS)
            out.extend(values)
        elif kind is tuple and len(kinds) == 1:
            out.append(_TUPLES)
            out.extend(map(len, values))
            inner = tuple(chain.from_iterable(values))
            if inner:
                self.write_all(inner)
        elif all(kind is type(None) or issubclass(kind, str) for kind in kinds):
            out.append(_TEXT)
            out.extend(map(self.texts.__getitem__, values))
        elif len(kinds) == 1:
            number, names = _fields(kind)
            out.append(number)
            for name in names:
                self.write_all(tuple(map(attrgetter(name), values)))
        else:
            out.append(_MIXED)
            for value in values:
                self.write(value)
