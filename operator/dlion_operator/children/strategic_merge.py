"""Merge a user's pod template into a rendered pod, as a strategic merge patch.

- Mappings are merged key by key; null deletes a key.
- Lists with a merge key (containers by name, mounts by path) are merged entry by entry.
- Other lists and values are replaced. So are entries of `env`, `volumes` and `resourceClaims`, each
  of which has one source.
- `$patch: delete` deletes an entry or mapping. `$patch: replace` replaces it with its other
  fields; as an entry of its own it replaces the list with the other entries.

Source: the patch strategies and merge keys of the Kubernetes API (k8s.io/api/core/v1), and
k8s.io/apimachinery/pkg/util/strategicpatch. Deviations: a keyed entry with `$patch: replace`
replaces that entry, as in kustomize. Entries of `env` are replaced, because merging value and
valueFrom gives an invalid entry.
"""

from collections.abc import Mapping, Sequence
from typing import Any

_MERGE_KEYS: Mapping[str, str] = {
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
_REPLACED_ENTRIES = frozenset({"env", "volumes", "resourceClaims"})
_DIRECTIVE = "$patch"
_DELETE, _REPLACE = "delete", "replace"


def merged(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` merged with `overlay`; neither is modified.

    >>> merged({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "B", "value": "2"}]})
    {'env': [{'name': 'A', 'value': '1'}, {'name': 'B', 'value': '2'}]}
    >>> merged({"args": ["a"], "tty": True}, {"args": ["b"], "tty": None})
    {'args': ['b']}
    """
    directive = overlay.get(_DIRECTIVE)
    if directive == _DELETE:
        return {}
    result = {} if directive == _REPLACE else dict(base)
    for name, value in overlay.items():
        if name == _DIRECTIVE:
            continue
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _merged_value(name, result.get(name), value)
    return result


def _merged_value(name: str, base: Any, overlay: Any) -> Any:
    if isinstance(overlay, Mapping):
        return merged(base if isinstance(base, Mapping) else {}, overlay)
    if not _is_list(overlay):
        return overlay
    there = list(base) if _is_list(base) else []
    key = _MERGE_KEYS.get(name)
    if key is None:
        return list(overlay)
    return _merged_entries(key, there, overlay, as_a_whole=name in _REPLACED_ENTRIES)


def _merged_entries(
    key: str, base: list[Any], overlay: Sequence[Any], *, as_a_whole: bool
) -> list[Any]:
    if any(_directive(entry) == _REPLACE and key not in entry for entry in overlay):
        base, overlay = [], [entry for entry in overlay if _directive(entry) is None]
    entries = list(base)
    for entry in overlay:
        if not _has_plain_key(entry, key):
            entries.append(entry)
            continue
        place = next((n for n, e in enumerate(entries) if _is_of(e, key, entry[key])), None)
        if _directive(entry) == _DELETE:
            entries = [each for each in entries if not _is_of(each, key, entry[key])]
        elif place is None:
            entries.append(merged({}, entry))
        else:
            entries[place] = merged({} if as_a_whole else entries[place], entry)
    return entries


def _directive(entry: Any) -> Any:
    return entry.get(_DIRECTIVE) if isinstance(entry, Mapping) else None


def _is_of(entry: Any, key: str, value: object) -> bool:
    return _has_plain_key(entry, key) and entry[key] == value


def _has_plain_key(entry: Any, key: str) -> bool:
    return isinstance(entry, Mapping) and isinstance(entry.get(key), str | int)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
