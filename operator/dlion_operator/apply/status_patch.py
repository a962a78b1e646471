"""Compute the patch from one status to another, and how urgent it is. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from dlion_operator.plan.outcome.job_status import TELEMETRY

TELEMETRY_EVERY_S: Final = 10.0
MAX_TELEMETRY_PER_S: Final = 10.0
"""Status writes of progress alone, over all jobs: while more than a hundred have news, each job's
are less frequent."""
ACTIVE_S: Final = 600.0
"""A job without a status write for so long has no news, as one that has ended."""


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


def telemetry_interval_s(written_s: Iterable[float], now_s: float) -> float:
    """Return the time between two writes of one job's progress. `written_s`: when the status of
    each job was last written.

    >>> telemetry_interval_s([0.0] * 500, 1.0), telemetry_interval_s([0.0] * 500, 3600.0)
    (50.0, 10.0)
    """
    active = sum(now_s - each < ACTIVE_S for each in written_s)
    return max(TELEMETRY_EVERY_S, active / MAX_TELEMETRY_PER_S)


def _without_messages(conditions: Any) -> list[tuple[object, ...]]:
    """The fields of conditions on which controllers act."""
    fields = ("type", "status", "reason", "observedGeneration")
    return [tuple(each.get(name) for name in fields) for each in conditions or ()]
