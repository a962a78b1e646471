"""Measuring on a machine that others use too: what a busy moment spoils is measured again.

For lower bounds only: a starved process cannot reach its rate. What may never happen (more than was
asked for) is asserted on every attempt, by the caller's `measure`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def first_that_holds(measure: Callable[[], T], holds: Callable[[T], bool], attempts: int = 4) -> T:
    """The first measurement of a few for which `holds`. Raises: AssertionError with all of them."""
    seen: list[T] = []
    for _ in range(attempts):
        seen.append(measure())
        if holds(seen[-1]):
            return seen[-1]
    raise AssertionError(f"none of {attempts} attempts will do: {seen}")
