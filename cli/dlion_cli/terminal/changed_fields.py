"""The fields in which a job's manifest differs from the job in the cluster.

Called by `submit` when the API server rejects a change, because it names only the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dlion_api.errors import SpecError
from dlion_api.spec import load_job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_NAMED: Final = 4
_ABSENT: Final = object()


def changed_fields(before: Mapping[str, Any] | None, after: Mapping[str, Any], under: str) -> str:
    """`field: old → new` for each changed field at or below `under`, with defaults filled in.

    Empty if either document is invalid or nothing differs.
    """
    try:
        old, new = (load_job(each).to_document() for each in (before, after))
    except SpecError:
        return ""
    if under == "spec.runId":
        under = ""  # report no other changes
        old, new = ({"spec": {"runId": each["spec"]["runId"]}} for each in (old, new))
    changes = [
        f"{path}: {_format_value(was)} → {_format_value(now)}"
        for path, was, now in _differences("", old, new)
        if path == under or path.startswith(f"{under}.") or not under
    ]
    more = f" and {len(changes) - MAX_NAMED} more" if len(changes) > MAX_NAMED else ""
    return "; ".join(changes[:MAX_NAMED]) + more


def _differences(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            where = f"{path}.{key}" if path else str(key)
            yield from _differences(where, old.get(key, _ABSENT), new.get(key, _ABSENT))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (was, now) in enumerate(zip(old, new, strict=True)):
            yield from _differences(f"{path}[{index}]", was, now)
    else:
        yield path, old, new


def _format_value(value: Any) -> str:
    text = "nothing" if value is _ABSENT else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
