"""Rules over several fields, each with a CEL expression, a message and a Python predicate.

The API server enforces the CEL expression, `parse` the predicate; contract tests compare them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dlion_api.errors import Problem

IsValid = Callable[[str], bool]
"""Whether the value at a path is valid, with its children and its parents."""

Check = Callable[[Any, IsValid], Iterable[Problem]]
"""Checks many values of an object and yields problems with paths relative to it.

For documents that no API server reads, so it has no CEL expression. It receives the same object as
`Rule.holds`, and must check that a path is valid before reading it. A document class lists its own
in `checks`.
"""


def _nothing(_: Any) -> str:
    return ""


@dataclass(frozen=True)
class Rule:
    """A constraint on the fields of one object.

    `holds` receives the parsed object (attributes in snake_case), or its valid part. It is called
    only if all fields in `reads` are valid: dotted document names, relative to the object. A
    problem is reported at the first of them; an empty name means the object. `given` and `allowed`
    return the given and the allowed values of an object that violates the rule.
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
    """A constraint on an update: `holds` receives the old and the new object."""

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
    """Require exactly one of these fields. Keywords are attributes, values document names."""
    names, count = tuple(fields.values()), _given(tuple(fields.values()), tuple(fields))
    return Rule(
        cel=f"{_counted(names)} == 1",
        message=f"exactly one of {', '.join(names)} must be given",
        holds=lambda it: count(it) == 1,
        reads=("", *names),
        advice=f"Give one of {', '.join(names)}.",
    )


def at_most_one(**fields: str) -> Rule:
    """Allow at most one of these fields. Keywords are attributes, values document names."""
    names, count = tuple(fields.values()), _given(tuple(fields.values()), tuple(fields))
    return Rule(
        cel=f"{_counted(names)} <= 1",
        message=f"only one of {', '.join(names)} may be given",
        holds=lambda it: count(it) <= 1,
        reads=("", *names),
        advice=f"Keep one of {', '.join(names)}.",
    )
