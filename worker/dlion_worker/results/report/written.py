"""What a result folder says of its run beside the events: `summary.json` and `environment.yaml`.

Used by `runs`. Files may be damaged, or another's: what makes no sense is left out and said in the
log, so that the page shows all that there is.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import yaml

from dlion_worker.results.environment import EnvironmentFigure, EnvironmentReport
from dlion_worker.results.folder import ENVIRONMENT, SUMMARY
from dlion_worker.results.summary import Ending, Json

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger(__name__)

MOST_BYTES = 64 << 20
DEEPEST = 64
_MOST_COUNT = 1 << 31
_SCALABILITY = ("accuracy", "speed_up", "efficiency", "throughput_ratio")

# The reader's constructors raise plain errors: `!!int x`, `!!bool x`, `!!timestamp x`, 2026-13-45.
_UNREADABLE = (
    OSError, ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError,
    yaml.YAMLError,
)  # fmt: skip

_FAST: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_FAST):  # type: ignore[misc] # with libyaml, where PyYAML has it
    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """No `<<`: what it merges may unfold without end, and no file of ours has it."""


def read_summary(folder: Path) -> Json:
    """What `summary.json` holds; empty where there is none that can be read."""
    return _mapping(folder / SUMMARY, json.loads)


def ending_of(summary: Json) -> Ending:
    """What a summary says of the end; a run that was killed has none."""
    ending = summary.get("ending")
    if not isinstance(ending, Mapping):
        return Ending("no summary: still running, or killed", succeeded=False)
    return Ending(
        stop_reason=_text(ending.get("stop_reason")),
        message=_text(ending.get("message")),
        succeeded=ending.get("succeeded") is True,
        started_at=_text(ending.get("started_at")),
        reason=_text(ending.get("reason")),
        missing=tuple(_ranks(ending.get("missing"))),
    )


def _ranks(value: object) -> list[int]:
    given = value if isinstance(value, list) else []
    return [rank for rank in given if type(rank) is int and rank >= 0]


def scalability_of(summary: Json) -> Json | None:
    """The speed-up that a summary tells; None where it tells none, or half of one."""
    told = summary.get("scalability")
    if not isinstance(told, Mapping):
        return None
    workers, reference = (_count(told.get(name)) for name in ("workers", "reference_workers"))
    values = {name: _number(told.get(name)) for name in _SCALABILITY}
    if workers is None or reference is None:
        return None
    if values["speed_up"] is not None and None in (values["accuracy"], values["efficiency"]):
        return None
    return {"workers": workers, "reference_workers": reference, **values}


def read_environment(folder: Path) -> EnvironmentReport | None:
    """What `environment.yaml` tells; None where there is none that can be read."""
    told = _mapping(folder / ENVIRONMENT, _yaml)
    if not told:
        return None
    figures, notes, document = (told.get(name) for name in ("figures", "notes", "document"))
    found = [_figure(each) for each in figures] if isinstance(figures, list) else []
    return EnvironmentReport(
        _text(told.get("name")),
        tuple(figure for figure in found if figure is not None),
        tuple(_text(note) for note in notes) if isinstance(notes, list) else (),
        document if isinstance(document, dict) else {},
    )


def _figure(told: object) -> EnvironmentFigure | None:
    if not isinstance(told, Mapping) or (rank := _count(told.get("rank"))) is None:
        return None
    return EnvironmentFigure(
        rank=rank,
        quantity=_text(told.get("quantity")),
        unit=_text(told.get("unit")),
        requested=_number(told.get("requested")),
        measured=_number(told.get("measured")),
        peer=_count(told.get("peer")),
        note=_text(told.get("note")),
        begins_s=_number(told.get("begins_s")) or 0.0,
    )


def _mapping(path: Path, parse: Callable[[bytes], Any]) -> Json:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"larger than {MOST_BYTES} bytes")
        values = parse(data)
    except FileNotFoundError:
        return {}
    except _UNREADABLE as error:
        _log.warning("%s: cannot be read (%.200s); the report goes without it", path, error)
        return {}
    return values if isinstance(values, dict) else {}


def _yaml(data: bytes) -> Any:
    """Raises: ValueError where it is nested so deep that the reader, which calls itself at every
    level, would overflow the stack: a crash that nothing catches."""
    depth = 0
    for event in yaml.parse(data, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"nested deeper than {DEEPEST} levels")
    return yaml.load(data, Loader=_Loader)  # noqa: S506 - a SafeLoader


def _text(value: object) -> str:
    """A text that can be written; empty for anything else."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # An integer may be too large for a float.
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _MOST_COUNT else None
