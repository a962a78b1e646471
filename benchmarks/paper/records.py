"""Recorded figures: a file in the repository for each comparison and environment.

All comparisons take longer than a machine is available, so they are recorded one by one, and the
page is made from the existing files. This module owns those files (JSON Lines: the comparison, then
a run per line). A piece whose settings differ from today's published.py is ignored.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from comparison import HERE, Comparison, environment

from dlion_api.atomic_file import write_atomically
from dlion_api.document import to_document
from dlion_environments.loading import load_environment
from dlion_results.comparison import VariantRow, VariantRun

FIGURES = HERE / "figures"
"""Has a folder for each edition."""

_DIGITS = 6
"""Significant digits of every figure."""


@dataclass(frozen=True)
class Piece:
    """One comparison in one environment, over all seeds."""

    comparison: Comparison
    """The comparison with only that environment."""
    rows: tuple[VariantRow, ...]
    commit: str
    """The commit at which it ran."""
    seeds: int


def record(edition: str, piece: Piece) -> Path:
    """Store the piece in place of an earlier one; return its path."""
    head = {"asked": _asked(piece.comparison), "commit": piece.commit, "seeds": piece.seeds}
    runs = [
        {"variant": row.variant, "learningRate": row.learning_rate, **_rounded(asdict(run))}
        for row in piece.rows
        for run in row.figures
    ]
    path = _path(edition, piece.comparison)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{json.dumps(line)}\n" for line in (head, *runs))
    write_atomically(path, text.encode(), mode=0o644)
    return path


def recorded(edition: str, comparison: Comparison) -> Piece | None:
    """Return the piece if it exists with today's settings."""
    path = _path(edition, comparison)
    if not path.exists():
        return None
    head, *runs = (json.loads(line) for line in path.read_text().splitlines())
    if head["asked"] != _asked(comparison):
        return None
    place = path.stem
    rows = tuple(
        VariantRow(place, variant, rate, tuple(figures(run) for run in own))
        for (variant, rate), own in groupby(
            runs, key=lambda run: (run.pop("variant"), run.pop("learningRate"))
        )
    )
    return Piece(comparison, rows, head["commit"], head["seeds"])


def figures(run: dict[str, Any]) -> VariantRun:
    """Return the figures of one run, from its JSON."""
    return VariantRun(**{**run, **{name: tuple(run[name]) for name in ("received_bytes", "curve")}})


def _asked(comparison: Comparison) -> str:
    """Return a digest of a comparison in one environment: its settings and files."""
    settings = asdict(comparison)
    for aside in ("file", "environments", "tuned_in", "held"):
        del settings[aside]
    (place,) = comparison.environments
    places = [
        _without_tracks(to_document(load_environment(environment(one))))
        for one in (place, comparison.tuned_in or place)
    ]
    digest = hashlib.sha256(json.dumps([settings, places], sort_keys=True).encode())
    for path in (comparison.file, *_programs(comparison)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _without_tracks(node: Any) -> Any:
    """Remove empty tracks from the environment: the first recorded pieces had none."""
    if isinstance(node, dict):
        return {
            key: _without_tracks(value) for key, value in node.items() if key != "track" or value
        }
    return [_without_tracks(one) for one in node] if isinstance(node, list) else node


def _programs(comparison: Comparison) -> list[Path]:
    """Return the files of training programs that its manifest, settings or columns name."""
    folder = comparison.file.parent
    words = (*comparison.settings, *comparison.columns.values(), comparison.file.read_text())
    named = "\n".join(words)
    return [
        path
        for path in sorted(folder.rglob("*.py"))
        if any(f"file{mark}{path.relative_to(folder)}" in named for mark in (": ", "="))
    ]


def _path(edition: str, comparison: Comparison) -> Path:
    (place,) = comparison.environments
    return FIGURES / (edition or "full") / comparison.name / f"{Path(place).stem}.jsonl"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
