"""Digests of plans: equal plans hash alike on every rank, machine and Python, without a text of everything.

A plan is nested tuples and frozen dataclasses of integers, booleans, strings and None. Its values are written
one after the other into one array of 64-bit integers, with the length of every tuple and the name of
every class, so that different plans make different arrays; the array is hashed.
"""

import sys
from array import array
from collections.abc import Callable, Hashable
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
    out = array("q")
    _write(value, out.append, out.extend, {})
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


def _write(
    value: Any, put: Callable[[int], None], put_all: Callable[[Any], None], texts: dict[str, int]
) -> None:
    kind: Any = type(value)
    if kind is int or kind is bool:
        put(value)
    elif kind is tuple:
        put(_TUPLE)
        put(len(value))
        if value and type(value[0]) is int and all(type(entry) is int for entry in value):
            put_all(value)
        else:
            for entry in value:
                _write(entry, put, put_all, texts)
    elif value is None:
        put(_NONE)
    elif isinstance(value, str):
        put(_NAMED)
        number = texts.get(value)  # plans repeat a few texts many times
        if number is None:
            number = texts[value] = _number(str(value))
        put(number)
    else:
        number, names = _fields(kind)
        put(number)
        own = value.__dict__
        for name in names:
            entry = own[name]
            if type(entry) is int:
                put(entry)
            else:
                _write(entry, put, put_all, texts)
