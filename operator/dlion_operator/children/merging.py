"""A user's pod template laid over a rendered pod, as strategic merge patches do it.

Lists whose entries have a key (containers by name, mounts by path) are merged entry by entry, other
lists are joined; a mapping is merged key by key; anything else is replaced. Source: the merge keys
that Kubernetes' API declares for these fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MERGE_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}


def merged(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `overlay` laid over it; neither is changed.

    >>> merged({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "B", "value": "2"}]})
    {'env': [{'name': 'A', 'value': '1'}, {'name': 'B', 'value': '2'}]}
    """
    result = dict(base)
    for name, value in overlay.items():
        result[name] = _merged_value(name, result[name], value) if name in result else value
    return result


def _merged_value(name: str, base: Any, overlay: Any) -> Any:
    if isinstance(base, Mapping) and isinstance(overlay, Mapping):
        return merged(base, overlay)
    if _is_list(base) and _is_list(overlay):
        key = _MERGE_KEYS.get(name)
        return [*base, *overlay] if key is None else _merged_entries(key, base, overlay)
    return overlay


def _merged_entries(key: str, base: Sequence[Any], overlay: Sequence[Any]) -> list[Any]:
    entries = list(base)
    places = {
        entry[key]: place for place, entry in enumerate(entries) if _has_plain_key(entry, key)
    }
    for entry in overlay:
        if _has_plain_key(entry, key) and entry[key] in places:
            place = places[entry[key]]
            entries[place] = merged(entries[place], entry)
        else:
            entries.append(entry)
    return entries


def _has_plain_key(entry: Any, key: str) -> bool:
    return isinstance(entry, Mapping) and isinstance(entry.get(key), str | int)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
