"""Compute the patch from one status to another, and whether it is urgent. Pure."""

from collections.abc import Mapping
from typing import Any

from dlion_operator.plan.outcome.job_status import TELEMETRY


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON merge patch (RFC 7396) from `old` to `new`. Empty: they are equal.

    >>> merge_patch({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 4, "d": 3}})
    {'a': None, 'b': {'c': 4}}
    """
    patch: dict[str, Any] = {name: None for name in old if name not in new}
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := merge_patch(before, value):
                patch[name] = inner
        elif name not in old or before != value:
            patch[name] = value
    return patch


def is_telemetry(old: Mapping[str, Any], patch: Mapping[str, Any]) -> bool:
    """Whether a status patch only holds figures and messages, which change constantly."""
    if not patch.keys() <= {*TELEMETRY, "conditions"}:
        return False
    before = old.get("conditions")
    return _without_messages(before) == _without_messages(patch.get("conditions", before))


def _without_messages(conditions: Any) -> list[tuple[object, ...]]:
    """The fields of conditions on which controllers act."""
    fields = ("type", "status", "reason", "observedGeneration")
    return [tuple(each.get(name) for name in fields) for each in conditions or ()]
