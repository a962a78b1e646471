"""Numbers of Kubernetes quantities such as `500m` and `1.5Gi`."""

import re
from decimal import Decimal
from typing import Any, Final

from dlion_api.document.scalars import MAX_QUANTITY_LENGTH, QUANTITY

_MAX_QUANTITY: Final = Decimal(2**63 - 1)
"""Kubernetes caps larger quantities at this value."""


def parse_quantity(text: str) -> Decimal:
    """The number in the resource's base unit: cores, bytes, devices. Raises: ValueError.

    >>> parse_quantity("500m"), parse_quantity("1.5Gi"), parse_quantity("1e3")
    (Decimal('0.500'), Decimal('1610612736.0'), Decimal('1E+3'))
    """
    from kubernetes import utils

    parser: Any = utils  # its functions have no types
    # Kubernetes' pattern first: the parser also accepts NaN and the like.
    if len(text) > MAX_QUANTITY_LENGTH or not re.fullmatch(QUANTITY, text):
        raise ValueError(f"{text[:MAX_QUANTITY_LENGTH]!r} is not a quantity")
    try:
        number: Decimal = parser.parse_quantity(text)
    except ValueError:  # the pattern allows a fractional exponent
        raise ValueError(f"{text!r} is not a quantity") from None
    return max(-_MAX_QUANTITY, min(number, _MAX_QUANTITY))
