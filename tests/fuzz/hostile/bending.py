"""Ways to alter valid bytes, JSON values and text.

Every function has its random generator as an argument and is repeatable. The module knows no format
of DLion.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

NUMBERS = (0, 1, 2, 3, 127, 128, 255, 2**15, 2**16 - 1, 2**31, 2**32 - 1)
LARGE = (*NUMBERS, 2**53, 2**53 + 1, 2**63, 2**64 - 1)
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 0.5, -0.5, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**400,
    1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf"), "", "0", "-1", "NaN",
    "Infinity", "01", "x" * 5000, "\ud800", "\x00", "\u202e", "1e999", "null", [], {}, [[]], [None],
    {"": None}, {"kind": "x"}, {"0": 1}, [0] * 5000, {str(n): n for n in range(5000)},
)  # fmt: skip


def bytes_of(rng: random.Random, data: bytes) -> bytes:
    """Flip bits; remove, repeat or insert a piece; truncate; or write extreme numbers."""
    broken = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(broken) + 1)
        end = at + rng.choice((1, 2, 4, 8, 40))
        what = rng.randrange(7)
        if what == 0 and at < len(broken):
            broken[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            del broken[at:]
        elif what == 2:
            broken[at:at] = rng.randbytes(rng.choice((1, 3, 40)))
        elif what == 3:
            del broken[at:end]
        elif what == 4:
            broken[at:at] = broken[at:end]
        elif what == 5 and at < len(broken):
            broken[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        else:
            width = rng.choice((2, 4, 8))
            number = rng.choice(LARGE) % 256**width
            broken[at : at + width] = number.to_bytes(width, rng.choice(("little", "big")))
    return bytes(broken)


def spliced(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Return the beginning of one value and the end of another."""
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def value_of(rng: random.Random, document: Any) -> Any:
    """Return a copy of a JSON value with one to three places changed, removed,
    repeated or added.
    """
    changed = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 3))):
        places = list(_places(changed))
        if not places:
            return rng.choice(ODD_VALUES)
        holder, key = rng.choice(places)
        what = rng.randrange(6)
        if what == 0:
            del holder[key]
        elif what == 1:
            _add(rng, holder, holder[key])
        elif what == 2:
            _, other = rng.choice(places)
            if isinstance(holder, dict):
                holder[str(other)] = holder.pop(key)
        else:
            holder[key] = copy.deepcopy(rng.choice(ODD_VALUES))
    return changed


def _places(value: Any) -> Any:
    """Return every (container, key) in a JSON value."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list) and len(value[key]) < 100:
            yield from _places(value[key])


def _add(rng: random.Random, holder: Any, value: Any) -> None:
    if isinstance(holder, dict):
        holder[rng.choice(("x", "", "0", "99", "-1", "kind", "rank", "\ud800"))] = value
    else:
        holder.append(copy.deepcopy(value))


def until_different(valid: T, alter: Callable[[], T]) -> T:
    """Return the first result of `alter` that differs from the valid value."""
    while (wrong := alter()) == valid:
        pass
    return wrong
