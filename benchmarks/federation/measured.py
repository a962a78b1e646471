"""What a part of the benchmark found: figures, and each bar with what was measured against it.

Kept as one JSON file a part, so that a part that has been measured is not measured again.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from local_runs import commit

from dlion_api.atomic_file import write_atomically

FILE = "figures.json"


@dataclass(frozen=True)
class Bar:
    """One thing that must be shown."""

    what: str
    measured: str
    met: bool


@dataclass(frozen=True)
class Measured:
    """One part, measured once."""

    part: str
    figures: dict[str, Any]
    bars: list[Bar] = field(default_factory=list)
    commit: str = field(default_factory=commit)
    load_average: float = field(default_factory=lambda: os.getloadavg()[0])
    """Of the last minute, when the part ended."""

    def save(self, folder: Path) -> None:
        """Into that folder."""
        write_atomically(folder / FILE, (json.dumps(asdict(self), indent=1) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> Measured | None:
        """What was saved there; None where nothing was."""
        try:
            document = json.loads((folder / FILE).read_text())
        except FileNotFoundError:
            return None
        return cls(**{**document, "bars": [Bar(**bar) for bar in document["bars"]]})
