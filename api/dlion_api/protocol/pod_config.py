"""Configuration of all pods of a run at a site: one file in the run's ConfigMap.

A pod derives its worker's configuration (`dlion_api.protocol.worker_config`) from it and from its
own group, index and address. Contains no secrets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dlion_api.errors import Problem, SpecError
from dlion_api.protocol.worker_config import MAX_CONFIG_BYTES


@dataclass(frozen=True)
class PodConfig:
    """Configuration shared by all pods of a run at one site."""

    job_document: Mapping[str, Any]
    """The manifest, for `dlion_api.spec.load_job`."""
    site: str
    coordinator_address: str
    """`host:port`."""
    keeper_address: str
    """`host:port` of the site's keeper."""

    def to_json(self) -> str:
        """Return the file's text; deterministic."""
        return json.dumps(asdict(self), indent=2, sort_keys=True, allow_nan=False) + "\n"

    @classmethod
    def load(cls, path: Path | str) -> PodConfig:
        """Load the configuration from a file.

        Raises:
            SpecError: It is not an output of `to_json`; lists all problems.
            OSError: The file cannot be read.
        """
        with Path(path).open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            problem = Problem("", "is too long", allowed=f"at most {MAX_CONFIG_BYTES} bytes")
            raise SpecError([problem], source=str(path))
        try:
            values = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise SpecError([Problem("", f"is not JSON: {error}")], source=str(path)) from error
        problems = _problems(values)
        if problems:
            raise SpecError(problems, source=str(path))
        return cls(**values)


def _problems(values: object) -> list[Problem]:
    if not isinstance(values, dict):
        return [Problem("", "is not an object", value=type(values).__name__)]
    kinds: dict[str, type] = {
        "job_document": dict, "site": str, "coordinator_address": str, "keeper_address": str
    }  # fmt: skip
    problems = [
        Problem(name, "unknown field", allowed=", ".join(kinds))
        for name in values
        if name not in kinds
    ]
    for name, kind in kinds.items():
        if name not in values:
            problems.append(Problem(name, "is missing"))
        elif not isinstance(values[name], kind) or not values[name]:
            problems.append(
                Problem(name, "wrong value", repr(values[name])[:200], f"{kind.__name__}, filled")
            )
    return problems
