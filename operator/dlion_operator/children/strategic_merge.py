"""Merge a user's pod template into a rendered pod, as a strategic merge patch.

- Mappings are merged key by key; null deletes a key.
- Lists with a merge key (containers by name, mounts by path) are merged entry by entry.
- Other lists and values are replaced. So are entries of `env`, `volumes` and `resourceClaims`, each
  of which has one source.
- `$patch: delete` deletes an entry or mapping. `$patch: replace` replaces it with its other
  fields; as an entry of its own it replaces the list with the other entries.
- `$retainKeys` lists the only fields that a mapping keeps.

Source: the patch strategies and merge keys of the Kubernetes API (k8s.io/api/core/v1), and
k8s.io/apimachinery/pkg/util/strategicpatch. Deviations: a keyed entry with `$patch: replace`
replaces that entry, as in kustomize, and a mapping with it need not exist. Entries of `env`,
`volumes` and `resourceClaims` are replaced without `$retainKeys`, as `kubectl apply` writes it: two
sources in one are invalid. New entries are added at the end, because init containers start in
order. `$setElementOrder` and `$deleteFromPrimitiveList`, which kubectl alone writes, are refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

MERGE_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""Merge keys by the list's name, which has one meaning everywhere in a pod's spec."""
_REPLACED_ENTRIES = frozenset({"env", "volumes", "resourceClaims"})
_PATCH, _RETAIN_KEYS = "$patch", "$retainKeys"
_DELETE, _REPLACE = "delete", "replace"
_REFUSED = ("$setElementOrder/", "$deleteFromPrimitiveList/")
_DELETED = object()


def merged(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` merged with `overlay`; neither is modified.

    Raises: ValueError if a directive is unknown, or contradicts its mapping.

    >>> merged({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "B", "value": "2"}]})
    {'env': [{'name': 'A', 'value': '1'}, {'name': 'B', 'value': '2'}]}
    >>> merged({"args": ["a"], "tty": True}, {"args": ["b"], "tty": None})
    {'args': ['b']}
    """
    directive = _directive(overlay)
    if directive == _DELETE:
        return {}
    result = {} if directive == _REPLACE else _retained(base, overlay)
    for name, value in overlay.items():
        if name in (_PATCH, _RETAIN_KEYS):
            continue
        if name.startswith(_REFUSED):
            raise ValueError(f"{name} is not supported; write the list as it shall be")
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _merged_value(name, result.get(name), value)
    return result


def _retained(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    kept = overlay.get(_RETAIN_KEYS)
    if kept is None:
        return dict(base)
    given = {name for name, value in overlay.items() if value is not None} - {_RETAIN_KEYS}
    if not _is_list(kept) or not given <= {each for each in kept if isinstance(each, str)}:
        raise ValueError(f"{_RETAIN_KEYS} must list all fields that are given beside it")
    return {name: value for name, value in base.items() if name in kept}


def _merged_value(name: str, base: Any, overlay: Any) -> Any:
    if isinstance(overlay, Mapping):
        return merged(base if isinstance(base, Mapping) else {}, overlay)
    if not _is_list(overlay):
        return overlay
    key = MERGE_KEYS.get(name)
    if key is None:
        return list(overlay)
    there = base if _is_list(base) else ()
    return _merged_entries(key, there, overlay, as_a_whole=name in _REPLACED_ENTRIES)


def _merged_entries(
    key: str, base: Sequence[Any], overlay: Sequence[Any], *, as_a_whole: bool
) -> list[Any]:
    """Merge lists whose entries `key` identifies, in a time linear in their lengths."""
    if any(_directive(entry) == _REPLACE and key not in entry for entry in overlay):
        base, overlay = (), [entry for entry in overlay if _directive(entry) is None]
    entries = list(base)
    places = {entry[key]: place for place, entry in enumerate(base) if _has_plain_key(entry, key)}
    for entry in overlay:
        if not _has_plain_key(entry, key):
            if _directive(entry) == _DELETE:
                raise ValueError(f"an entry with {_PATCH}: {_DELETE} needs its {key}")
            entries.append(entry)  # for the API server to refuse
            continue
        place = places.get(entry[key])
        if _directive(entry) == _DELETE:
            if place is not None:
                entries[places.pop(entry[key])] = _DELETED
        elif place is None:
            places[entry[key]] = len(entries)
            entries.append(merged({}, entry))
        else:
            entries[place] = merged({} if as_a_whole else entries[place], entry)
    return [entry for entry in entries if entry is not _DELETED]


def _directive(entry: Any) -> Any:
    """Raises: ValueError if it is unknown."""
    found = entry.get(_PATCH) if isinstance(entry, Mapping) else None
    if found not in (None, _DELETE, _REPLACE):
        raise ValueError(f"{_PATCH} is {found!r:.60}; allowed: {_DELETE}, {_REPLACE}")
    return found


def _has_plain_key(entry: Any, key: str) -> bool:
    if not isinstance(entry, Mapping):
        return False
    value = entry.get(key)
    return isinstance(value, str | int) and not isinstance(value, bool)  # True equals 1


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
