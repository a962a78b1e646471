"""How a status becomes a patch: what differs, and whether it matters now. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlion_operator.statuses import TELEMETRY


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch (RFC 7396) from one to the other; empty: they are the same.

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
    """Whether a status patch holds nothing but figures and words that change all the time."""
    if not patch.keys() <= {*TELEMETRY, "conditions"}:
        return False
    return _without_words(old.get("conditions")) == _without_words(
        patch.get("conditions", old.get("conditions"))
    )


def _without_words(conditions: Any) -> list[tuple[object, ...]]:
    """What of conditions a controller acts on."""
    fields = ("type", "status", "reason", "observedGeneration")
    return [tuple(each.get(name) for name in fields) for each in conditions or ()]
