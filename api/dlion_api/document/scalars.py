"""Parse single values. Used by `parsing` only."""

import math
import re
import sys
from collections.abc import Mapping
from typing import Any, Final

from dlion_api.document import shapes
from dlion_api.document.declaring import Limits
from dlion_api.errors import Problem
from dlion_api.suggestions import did_you_mean

_DECIMAL = r"(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
QUANTITY: Final = rf"(\+|-)?{_DECIMAL}(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?{_DECIMAL}))?"
"""Kubernetes' pattern for quantities (apimachinery, resource.Quantity)."""
_NUMBER: Final = r"[-+]?[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?"

MAX_FREE_DEPTH: Final = 32
BELOW: Final = "Write its fields below it as `name: …`."
MAX_SHOWN_LENGTH: Final = 60
MAX_QUANTITY_LENGTH: Final = 32


class FaultError(Exception):
    """A problem of one value; the parser adds its path and line."""

    def __init__(self, message: str, value: str = "", allowed: str = "", advice: str = "") -> None:
        super().__init__(message)
        self.problem = Problem("", message, value, allowed, advice)


def shown(value: object) -> str:
    """Return a value in the user's notation, short enough for one line.

    >>> shown(True), shown("a"), shown([1, 2])
    ('true', '"a"', 'a list of 2')
    """
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return f'"{value[:MAX_SHOWN_LENGTH]}{"…" * (len(value) > MAX_SHOWN_LENGTH)}"'
        case int() if abs(value) >= 10**MAX_SHOWN_LENGTH:
            return f"an integer of {value.bit_length()} bits"
        case int() | float():
            return str(value)
        case Mapping():
            return f"a mapping of {len(value)}"
        case list() | tuple():
            return f"a list of {len(value)}"
        case _:
            return f"a {type(value).__name__}"


def as_scalar(shape: shapes.Scalar, value: object) -> Any:
    """Return the value if it has the shape's kind and is within its limits. Raises: FaultError."""
    if shape.kind == "string":
        return _string(shape, value)
    if shape.kind == "boolean":
        if not isinstance(value, bool):
            raise FaultError("must be true or false", shown(value), "true, false")
        return value
    return _number(shape, value)


def _string(shape: shapes.Scalar, value: object) -> str:
    if not isinstance(value, str):
        # Not with the value: YAML text such as 1e3 or yes is another one by now.
        advice = "Put its text in quotes." if isinstance(value, int | float) else ""
        raise FaultError("must be a string", shown(value), ", ".join(shape.choices), advice)
    if shape.choices and value not in shape.choices:
        advice = did_you_mean(value, shape.choices)
        raise FaultError("is not an allowed value", shown(value), ", ".join(shape.choices), advice)
    limits = shape.limits
    if limits.max_length is not None and len(value) > limits.max_length:
        raise FaultError(f"is too long: {len(value)}", shown(value), f"up to {limits.max_length}")
    if len(value) < limits.min_length:
        raise FaultError("is too short", shown(value), f"at least {limits.min_length} characters")
    if limits.pattern is not None and not re.fullmatch(limits.pattern, value):
        allowed = limits.pattern_description or limits.pattern
        raise FaultError("has the wrong form", shown(value), allowed)
    return value


def _number(shape: shapes.Scalar, value: object) -> int | float:
    kind = "an integer" if shape.kind == "integer" else "a number"
    if isinstance(value, bool) or not isinstance(value, int | float):
        quoted = isinstance(value, str) and re.fullmatch(_NUMBER, value[:MAX_SHOWN_LENGTH])
        advice = "Take it out of its quotes." if quoted else ""
        raise FaultError(f"must be {kind}", shown(value), bounds(shape.limits), advice)
    if isinstance(value, float) and not math.isfinite(value):
        raise FaultError("must be finite", shown(value), bounds(shape.limits))
    is_float = shape.kind == "number"
    if not _within(shape.limits, value) or (is_float and abs(value) > sys.float_info.max):
        raise FaultError("is out of bounds", shown(value), bounds(shape.limits))
    if is_float:
        return float(value)
    if value != int(value):
        raise FaultError("must be an integer", shown(value), bounds(shape.limits))
    return int(value)


def _within(limits: Limits, value: float) -> bool:
    return (
        (limits.minimum is None or value >= limits.minimum)
        and (limits.maximum is None or value <= limits.maximum)
        and (limits.above is None or value > limits.above)
        and (limits.below is None or value < limits.below)
    )


def bounds(limits: Limits) -> str:
    """Return a description of the allowed numbers.

    >>> from dlion_api.document import Limits
    >>> bounds(Limits(above=0, maximum=1))
    'above 0, at most 1'
    """
    parts = (
        ("at least", limits.minimum),
        ("above", limits.above),
        ("at most", limits.maximum),
        ("below", limits.below),
    )
    if limits.minimum is not None and limits.maximum is not None:
        return f"{limits.minimum:.15g} to {limits.maximum:.15g}"
    return ", ".join(f"{text} {bound:.15g}" for text, bound in parts if bound is not None)


def as_quantity(value: object) -> str:
    """Return a Kubernetes quantity as a string. Raises: FaultError."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return str(value)
    if not isinstance(value, str):
        advice = f'Put it in quotes: "{value}".' if isinstance(value, float) else ""
        raise FaultError("must be a quantity", shown(value), "such as 2, 500m or 1Gi", advice)
    if len(value) > MAX_QUANTITY_LENGTH or not re.fullmatch(QUANTITY, value):
        raise FaultError("must be a quantity", shown(value), "such as 2, 500m or 1Gi")
    return value


def as_free(value: object) -> dict[str, Any]:
    """A mapping of plain JSON values, copied. Raises `FaultError`."""
    if not isinstance(value, Mapping):
        raise FaultError("must be a mapping", shown(value), advice=BELOW)
    copied: dict[str, Any] = _plain(value, MAX_FREE_DEPTH)
    return copied


def _plain(value: object, depth: int) -> Any:
    if depth == 0:
        raise FaultError("is nested too deep", allowed=f"up to {MAX_FREE_DEPTH} levels")
    match value:
        case None | bool() | str() | int():
            return value
        case float() if math.isfinite(value):
            return value
        case list() | tuple():
            return [_plain(item, depth - 1) for item in value]
        case Mapping() if all(isinstance(key, str) for key in value):
            return {key: _plain(item, depth - 1) for key, item in value.items()}
        case _:
            allowed = "strings, numbers, lists, mappings"
            raise FaultError("has a value that JSON cannot hold", shown(value), allowed)
