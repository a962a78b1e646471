"""What GitOps tools make of objects and of their own manifests, by these tools' Go code.

The program is built from the Go module in `verdicts/` once, into the testbed's cache
(testbed.binaries); its sources say what it takes and gives.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.binaries import build_once, cache_folder, go, hash_of

MODULE = Path(__file__).with_name("verdicts")


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


def _program() -> Path:
    return cache_folder() / f"gitops-verdicts-{hash_of(MODULE)}" / "verdicts"


def built() -> Path | None:
    """The program; None where it has to be built first."""
    program = _program()
    return program if program.with_name(".complete").exists() else None


def build() -> Path:
    """The program, built now if need be (minutes on two cores; then nothing).

    Raises: UnavailableError with the end of what Go said.
    """
    program = _program()
    build_once(program.parent, _make)
    return program


def _make(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as made:
        go("build", "-trimpath", "-ldflags", "-s -w", "-o", made, ".", module=MODULE)
        (Path(made) / "verdicts").rename(folder / "verdicts")


@dataclass(frozen=True)
class Judge:
    """The program, where it is built."""

    program: Path

    def check(self, files: Iterable[Path]) -> None:
        """Every document is what its kind allows. Raises: ValueError with what is wrong."""
        self._run("check", files, "")

    def verdicts(
        self, files: Iterable[Path], objects: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Verdicts]:
        """What is made of each object, with the rules in the files. Raises: ValueError."""
        said = json.loads(self._run("judge", files, json.dumps(objects)))
        return {
            name: Verdicts(
                each["kstatus"], tuple(each["flux"]), tuple(each["fleet"]), each["feedback"]
            )
            for name, each in said.items()
        }

    def _run(self, what: str, files: Iterable[Path], text: str) -> str:
        command = [str(self.program), what, *map(str, files)]
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, check=False, timeout=60
        )
        if done.returncode != 0:
            raise ValueError(done.stderr.strip())
        return done.stdout
