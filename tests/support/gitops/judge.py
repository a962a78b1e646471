"""What GitOps tools make of objects and of their own manifests, by these tools' Go code.

The sources of the program, in `verdicts/`, say what it takes and gives.
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
    """What is made of one object."""

    kstatus: str
    flux: tuple[str, ...]
    """By the expressions of each Kustomization."""
    fleet: tuple[str, ...]
    """By each fleet.yaml: ready, transitioning or error."""
    feedback: dict[str, Any]
    """What Open Cluster Management brings back."""


@dataclass(frozen=True)
class Judge:
    """The program, where it is built."""

    program: Path

    def check(self, files: Iterable[Path]) -> None:
        """Every document is what its kind allows. Raises: ValueError with what is wrong."""
        output_of(self.program, ["check", *files], "")

    def verdicts(
        self, files: Iterable[Path], objects: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Verdicts]:
        """What is made of each object, with the rules in the files. Raises: ValueError."""
        judged = json.loads(output_of(self.program, ["judge", *files], json.dumps(objects)))
        return {
            name: Verdicts(
                each["kstatus"], tuple(each["flux"]), tuple(each["fleet"]), each["feedback"]
            )
            for name, each in judged.items()
        }
