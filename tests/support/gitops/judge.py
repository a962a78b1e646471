"""The verdicts of GitOps tools on objects and on their own manifests, by these tools' Go code.

The sources of the program, in `verdicts/`, define its input and output.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gitops.programs import GoProgram, output_of

VERDICTS = GoProgram("verdicts")


@dataclass(frozen=True)
class Verdicts:
    """The verdicts on one object."""

    kstatus: str
    flux: tuple[str, ...]
    """By the expressions of each Kustomization."""
    fleet: tuple[str, ...]
    """By each fleet.yaml: ready, transitioning or error."""
    feedback: dict[str, Any]
    """The feedback of Open Cluster Management."""


@dataclass(frozen=True)
class Judge:
    """The program, if it is built."""

    program: Path

    def check(self, files: Iterable[Path]) -> None:
        """Check every document against its kind. Raises: ValueError with the violation."""
        output_of(self.program, ["check", *files], "")

    def verdicts(
        self, files: Iterable[Path], objects: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Verdicts]:
        """Return the verdicts on each object, with the rules in the files. Raises: ValueError."""
        judged = json.loads(output_of(self.program, ["judge", *files], json.dumps(objects)))
        return {
            name: Verdicts(
                each["kstatus"], tuple(each["flux"]), tuple(each["fleet"]), each["feedback"]
            )
            for name, each in judged.items()
        }
