"""The results of a part of the benchmark: figures, and each bar with its measured value.

Each part has one JSON file, so that it is measured only once.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from local_runs import commit

from dlion_api.atomic_file import write_atomically

Document = dict[str, Any]

FILE = "figures.json"


@dataclass(frozen=True)
class Bar:
    """One requirement."""

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
    """Load of the last minute at the end of the part."""

    def save(self, folder: Path, manifest: Document) -> None:
        """Save it in that folder, as measured with that manifest."""
        document = {"manifest": manifest, "found": asdict(self)}
        write_atomically(folder / FILE, (json.dumps(document, indent=1) + "\n").encode())

    @classmethod
    def load(cls, folder: Path, manifest: Document) -> Measured | None:
        """Load the result saved there with that manifest; None if there is none."""
        try:
            document = json.loads((folder / FILE).read_text())
        except FileNotFoundError:
            return None
        if document.get("manifest") != manifest:
            return None
        found = document["found"]
        return cls(**{**found, "bars": [Bar(**bar) for bar in found["bars"]]})
