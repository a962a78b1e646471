"""Rules over several fields, each said three times in one place: in CEL, in words, in Python.

The API server enforces the CEL text, `parse` the predicate; the contract tests hold them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dlion_api.errors import Problem

Sound = Callable[[str], bool]
"""Whether nothing is wrong at a path within an object, in what it holds or in what holds it."""

Check = Callable[[Any, Sound], Iterable[Problem]]
"""What must hold among many places of an object, each told by its path within it.

For documents that no API server reads: unlike a `Rule` it has no CEL text. It sees what
`Rule.holds` sees, and asks whether a place is sound before it reads it. A document class names its
own in `checks`.
"""


def _nothing(_: Any) -> str:
    return ""


@dataclass(frozen=True)
class Rule:
    """What must hold among the fields of one object.

    `holds` sees the parsed object (attributes in snake_case), or, where a part of the document is
    wrong, what could be parsed of it; it is asked only if nothing that it `reads` is wrong.
    `reads` are dotted names in the document relative to the object; the first is blamed
    (an empty one blames the object). `given` and `allowed` say of an object that breaks it what is
    there and what would do.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool]
    reads: tuple[str, ...]
    advice: str = ""
    given: Callable[[Any], str] = _nothing
    allowed: Callable[[Any], str] = _nothing


@dataclass(frozen=True)
class TransitionRule:
    """What must hold between an object as it stands (first) and as it is to become (second)."""

    cel: str
    message: str
    holds: Callable[[Any, Any], bool]
    path: str = ""


def _given(names: tuple[str, ...], attributes: tuple[str, ...]) -> Callable[[Any], int]:
    assert len(names) == len(attributes)
    return lambda it: sum(getattr(it, attribute) is not None for attribute in attributes)


def _counted(names: tuple[str, ...]) -> str:
    return " + ".join(f"(has(self.{name}) ? 1 : 0)" for name in names)


def exactly_one(**fields: str) -> Rule:
    """One of these fields and no other is given. Keywords are attributes, values document names."""
    names, count = tuple(fields.values()), _given(tuple(fields.values()), tuple(fields))
    return Rule(
        cel=f"{_counted(names)} == 1",
        message=f"exactly one of {', '.join(names)} must be given",
        holds=lambda it: count(it) == 1,
        reads=("", *names),
        advice=f"Give one of {', '.join(names)}.",
    )


def at_most_one(**fields: str) -> Rule:
    """No two of these fields are given. Keywords are attributes, values document names."""
    names, count = tuple(fields.values()), _given(tuple(fields.values()), tuple(fields))
    return Rule(
        cel=f"{_counted(names)} <= 1",
        message=f"only one of {', '.join(names)} may be given",
        holds=lambda it: count(it) <= 1,
        reads=("", *names),
        advice=f"Keep one of {', '.join(names)}.",
    )
