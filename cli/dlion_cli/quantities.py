"""Kubernetes' quantities as numbers: `500m`, `1.5Gi`, `1e3`."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Final

from dlion_api.document.scalars import QUANTITY

LONGEST: Final = 32
_THOUSANDS: Final = {
    "n": -3, "u": -2, "m": -1, "": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6
}  # fmt: skip
_PARTS = re.compile(r"([-+0-9.]+)([a-zA-Z]?i?)")


def quantity(text: str) -> Decimal:
    """The number that is meant, in the unit of the resource: cores, bytes, devices.

    Raises: ValueError where it is none.

    >>> quantity("500m"), quantity("1.5Gi"), quantity("1e3")
    (Decimal('0.500'), Decimal('1610612736.0'), Decimal('1E+3'))
    """
    if len(text) > LONGEST or not re.fullmatch(QUANTITY, text):
        raise ValueError(f"{text[:LONGEST]!r} is no quantity")
    parts = _PARTS.fullmatch(text)
    try:
        if parts is None:  # with an exponent
            return Decimal(text)
        number, suffix = Decimal(parts[1]), parts[2]
    except InvalidOperation:
        raise ValueError(f"{text!r} is no quantity") from None
    if suffix.endswith("i"):
        return number * Decimal(1024) ** _THOUSANDS[suffix[0]]
    return number.scaleb(3 * _THOUSANDS[suffix])
