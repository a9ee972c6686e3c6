"""Digests of plans: equal plans hash alike on every rank, machine and Python, without a text of everything.

A plan is nested tuples and frozen dataclasses of integers, booleans, strings and None. Its values are written
one after the other into one array of 64-bit integers, with the length of every tuple and the name of
every class, so that different plans make different arrays; the array is hashed.
"""

import sys
from array import array
from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from functools import cache
from hashlib import blake2b
from typing import Any

_NONE, _TUPLE, _NAMED = -(2**62), -(2**62) + 1, -(2**62) + 2


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


class _Writer:
    """Writes values into `out`. Plans repeat texts, and the lists of many ranks the same ops: an object that
    was written before is copied.
    """

    def __init__(self) -> None:
        self.out = array("q")
        self.texts: dict[str, int] = {}
        self.written: dict[int, array[int]] = {}  # by identity; whoever holds the plan keeps its objects

    def write(self, value: Any) -> None:
        kind: Any = type(value)
        out = self.out
        if kind is int or kind is bool:
            out.append(value)
        elif kind is tuple:
            out.append(_TUPLE)
            out.append(len(value))
            if set(map(type, value)) == {int}:
                out.extend(value)
            else:
                for entry in value:
                    self.write(entry)
        elif value is None:
            out.append(_NONE)
        elif isinstance(value, str):
            out.append(_NAMED)
            number = self.texts.get(value)
            if number is None:
                number = self.texts[value] = _number(str(value))
            out.append(number)
        elif id(value) in self.written:
            out.extend(self.written[id(value)])
        else:
            start = len(out)
            number, names = _fields(kind)
            out.append(number)
            own = value.__dict__
            for name in names:
                entry = own[name]
                if type(entry) is int:
                    out.append(entry)
                else:
                    self.write(entry)
            self.written[id(value)] = out[start:]
