"""Rules over several fields, each with a CEL expression, a message and a Python predicate.

The API server enforces the CEL expression, `parse` the predicate; contract tests compare them.
"""

from collections.abc import Callable, Iterable, Mapping
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
    """A constraint on an update, which only the API server enforces; `path` names the field."""

    cel: str
    message: str
    path: str


def exactly_one(**fields: str) -> Rule:
    """Require exactly one of these fields. Keywords are attributes, values document names."""
    listed = ", ".join(fields.values())
    message, advice = f"exactly one of {listed} must be given", f"Give one of {listed}."
    return _count_rule(fields, "== 1", lambda count: count == 1, message, advice)


def at_most_one(**fields: str) -> Rule:
    """Allow at most one of these fields. Keywords are attributes, values document names."""
    listed = ", ".join(fields.values())
    message, advice = f"only one of {listed} may be given", f"Keep one of {listed}."
    return _count_rule(fields, "<= 1", lambda count: count <= 1, message, advice)


def _count_rule(
    fields: Mapping[str, str],
    cel: str,
    is_allowed: Callable[[int], bool],
    message: str,
    advice: str,
) -> Rule:
    """Return a rule on the number of these fields that are given."""
    return Rule(
        cel=" + ".join(f"(has(self.{name}) ? 1 : 0)" for name in fields.values()) + f" {cel}",
        message=message,
        holds=lambda it: is_allowed(sum(getattr(it, each) is not None for each in fields)),
        reads=("", *fields.values()),
        advice=advice,
    )
