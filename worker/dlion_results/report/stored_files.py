"""Reads `summary.json` and `environment.yaml` of a result folder.

The files may be damaged or foreign: invalid parts are left out and logged, so that the page shows
the rest.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from dlion_results.run_folder.environment import EnvironmentFigure, EnvironmentReport
from dlion_results.run_folder.folder import ENVIRONMENT, SUMMARY
from dlion_results.summary.summary import Ending, Json

_log = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
MAX_DEPTH = 64
_MAX_COUNT = 1 << 31
_SCALABILITY = ("accuracy", "speed_up", "efficiency", "throughput_ratio")

# PyYAML's constructors raise built-in errors: `!!int x`, `!!bool x`, `!!timestamp x`, 2026-13-45.
_UNREADABLE = (
    OSError, ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError,
    yaml.YAMLError,
)  # fmt: skip

_FAST: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_FAST):  # type: ignore[misc] # with libyaml, where PyYAML has it
    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Ignore `<<`: a merge may expand without bound, and our files do not use it."""


def read_summary(folder: Path) -> Json:
    """Content of `summary.json`; empty if it cannot be read."""
    return _mapping(folder / SUMMARY, json.loads)


def stored_ending(summary: Json) -> Ending:
    """The ending in a summary; a run that was killed has none."""
    ending = summary.get("ending")
    if not isinstance(ending, Mapping):
        return Ending("no summary: still running, or killed", succeeded=False)
    return Ending(
        stop_reason=_text(ending.get("stop_reason")),
        message=_text(ending.get("message")),
        succeeded=ending.get("succeeded") is True,
        started_at=_text(ending.get("started_at")),
        reason=_text(ending.get("reason")),
        missing=tuple(rank for rank in _list(ending, "missing") if type(rank) is int and rank >= 0),
    )


def _list(stored: Mapping[str, Any], name: str) -> list[Any]:
    """The list of that name; empty where there is none."""
    value = stored.get(name)
    return value if isinstance(value, list) else []


def stored_scalability(summary: Json) -> Json | None:
    """The speed-up in a summary; None if it is missing or incomplete."""
    stored = summary.get("scalability")
    if not isinstance(stored, Mapping):
        return None
    workers, reference = (_count(stored.get(name)) for name in ("workers", "reference_workers"))
    values = {name: _number(stored.get(name)) for name in _SCALABILITY}
    if workers is None or reference is None:
        return None
    if values["speed_up"] is not None and None in (values["accuracy"], values["efficiency"]):
        return None
    return {"workers": workers, "reference_workers": reference, **values}


def read_environment(folder: Path) -> EnvironmentReport | None:
    """Content of `environment.yaml`; None if it cannot be read."""
    stored = _mapping(folder / ENVIRONMENT, _yaml)
    if not stored:
        return None
    document = stored.get("document")
    return EnvironmentReport(
        _text(stored.get("name")),
        tuple(filter(None, map(_figure, _list(stored, "figures")))),
        tuple(map(_text, _list(stored, "notes"))),
        document if isinstance(document, dict) else {},
    )


def _figure(stored: object) -> EnvironmentFigure | None:
    if not isinstance(stored, Mapping) or (rank := _count(stored.get("rank"))) is None:
        return None
    return EnvironmentFigure(
        rank=rank,
        quantity=_text(stored.get("quantity")),
        unit=_text(stored.get("unit")),
        requested=_number(stored.get("requested")),
        measured=_number(stored.get("measured")),
        peer=_count(stored.get("peer")),
        note=_text(stored.get("note")),
        begins_s=_number(stored.get("begins_s")) or 0.0,
    )


def _mapping(path: Path, parse: Callable[[bytes], Any]) -> Json:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES} bytes")
        values = parse(data)
    except FileNotFoundError:
        return {}
    except _UNREADABLE as error:
        _log.warning("%s: cannot be read (%.200s); the report goes without it", path, error)
        return {}
    return values if isinstance(values, dict) else {}


def _yaml(data: bytes) -> Any:
    """Parse YAML of limited depth.

    Raises ValueError for deeper nesting, because the recursive reader would overflow the stack and
    crash.
    """
    depth = 0
    for event in yaml.parse(data, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    return yaml.load(data, Loader=_Loader)  # noqa: S506 - a SafeLoader


def _text(value: object) -> str:
    """The text, with unencodable characters replaced; empty for any other type."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # An integer may be too large for a float.
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _MAX_COUNT else None
