"""Reads `summary.json` and `environment.yaml` of a result folder.

The files may be damaged or foreign: invalid parts are left out and logged, so that the page shows
the rest.
"""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from dlion_results.run_folder.environment import (
    COMMAND_FIELD,
    EnvironmentFigure,
    EnvironmentReport,
    LocalCommand,
)
from dlion_results.run_folder.layout import ENVIRONMENT, SUMMARY
from dlion_results.run_folder.regular_files import read_start
from dlion_results.run_folder.stored_values import (
    MAX_BYTES,
    MAX_FIGURE,
    UNREADABLE,
    count_of,
    number_of,
    parse_mapping,
    parse_yaml,
    text_of,
)
from dlion_results.summary.summary import Ending, Json

_log = logging.getLogger(__name__)

UNFINISHED = "no summary: still running, or killed"
"""The stop reason of a run whose folder has no summary."""

MAX_ENTRIES: Final = 1000
"""Figures and notes of an environment that are read: the page shows fewer."""

_SCALABILITY = ("accuracy", "speed_up", "efficiency", "throughput_ratio")


def read_summary(folder: Path) -> Json:
    """Content of `summary.json`; empty if it cannot be read."""
    return _mapping(folder / SUMMARY, json.loads)


def stored_ending(summary: Json) -> Ending:
    """The ending in a summary; a run that was killed has none."""
    ending = summary.get("ending")
    if not isinstance(ending, Mapping):
        return Ending(UNFINISHED, succeeded=False)
    return Ending(
        stop_reason=text_of(ending.get("stop_reason")),
        message=text_of(ending.get("message")),
        succeeded=ending.get("succeeded") is True,
        started_at=text_of(ending.get("started_at")),
        reason=text_of(ending.get("reason")),
        command_s=_duration_s(ending.get("command_s")),
        virtual_time=ending.get("virtual_time") is True,
        missing=tuple(rank for rank in _list(ending, "missing") if type(rank) is int and rank >= 0),
    )


def _duration_s(stored: object) -> float | None:
    """The seconds, if a run can last so long."""
    seconds = number_of(stored, below=MAX_FIGURE)
    return seconds if seconds is not None and seconds >= 0 else None


def _list(stored: Mapping[str, Any], name: str) -> list[Any]:
    """The list of that name; empty where there is none."""
    value = stored.get(name)
    return value if isinstance(value, list) else []


def stored_scalability(summary: Json) -> Json | None:
    """The speed-up in a summary; None if it is missing or incomplete."""
    stored = summary.get("scalability")
    if not isinstance(stored, Mapping):
        return None
    workers, reference = (count_of(stored.get(name)) for name in ("workers", "reference_workers"))
    values = {name: number_of(stored.get(name)) for name in _SCALABILITY}
    if workers is None or reference is None:
        return None
    if values["speed_up"] is not None and None in (values["accuracy"], values["efficiency"]):
        return None
    return {"workers": workers, "reference_workers": reference, **values}


def read_environment(folder: Path) -> EnvironmentReport | None:
    """Content of `environment.yaml`; None if it cannot be read."""
    stored = _mapping(folder / ENVIRONMENT, parse_yaml)
    if not stored:
        return None
    document, command = stored.get("document"), text_of(stored.get(COMMAND_FIELD))
    return EnvironmentReport(
        text_of(stored.get("name")),
        tuple(filter(None, map(_figure, _list(stored, "figures")[:MAX_ENTRIES]))),
        tuple(map(text_of, _list(stored, "notes")[:MAX_ENTRIES])),
        document if isinstance(document, dict) else {},
        LocalCommand(command) if command in set(LocalCommand) else None,
    )


def _figure(stored: object) -> EnvironmentFigure | None:
    if not isinstance(stored, Mapping) or (rank := count_of(stored.get("rank"))) is None:
        return None
    return EnvironmentFigure(
        rank=rank,
        quantity=text_of(stored.get("quantity")),
        unit=text_of(stored.get("unit")),
        requested=number_of(stored.get("requested")),
        measured=number_of(stored.get("measured")),
        peer=count_of(stored.get("peer")),
        note=text_of(stored.get("note")),
        begins_s=number_of(stored.get("begins_s")) or 0.0,
    )


def _mapping(path: Path, parse: Callable[[bytes], Any]) -> Json:
    try:
        return parse_mapping(read_start(path, MAX_BYTES + 1, follow_links=True), parse)
    except FileNotFoundError:
        return {}
    except UNREADABLE as error:
        _log.warning("%s: cannot be read (%.200s); the report goes without it", path, error)
        return {}
