"""Measurements on a shared machine: a measurement spoilt by other load is repeated.

For bounds that other load can break: a starved process cannot reach its rate, and reads late, so
that a window contains more bytes. Bounds that no load can break are asserted on every attempt, by
the caller's `measure`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def first_that_holds(measure: Callable[[], T], holds: Callable[[T], bool], attempts: int = 4) -> T:
    """Return the first measurement for which `holds`. Raises: AssertionError with all of them."""
    measurements: list[T] = []
    for _ in range(attempts):
        measurements.append(measure())
        if holds(measurements[-1]):
            return measurements[-1]
    raise AssertionError(f"none of {attempts} attempts succeeded: {measurements}")
