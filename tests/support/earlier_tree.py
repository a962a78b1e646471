"""This project as it was at an earlier commit: its chart and definition, and its code to run."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMIT = "b99feeff697c"
"""No version is released yet; the first one's tag takes this one's place."""
_CODE = ("api", "operator", "worker")


@dataclass(frozen=True)
class EarlierTree:
    """Files of that commit below a folder."""

    folder: Path

    @classmethod
    def take(cls, folder: Path) -> EarlierTree:
        """Those of `COMMIT`; skips where the history does not reach back to it."""
        git = ("git", "-C", str(ROOT))
        known = [*git, "rev-parse", "--verify", "--quiet", f"{COMMIT}^{{commit}}"]
        if not shutil.which("git") or subprocess.run(known, capture_output=True).returncode:
            pytest.skip(f"no commit {COMMIT} here to upgrade from: git fetch --unshallow")
        folder.mkdir()
        archive = subprocess.run(
            [*git, "archive", COMMIT, "helm/dlion", "crds", *_CODE], capture_output=True, check=True
        )
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
        return cls(folder)

    @property
    def chart(self) -> Path:
        """The operator's."""
        return self.folder / "helm" / "dlion"

    @property
    def definition(self) -> Path:
        """Of DLionJob."""
        return self.folder / "crds" / "dlionjob.yaml"

    @property
    def environment(self) -> dict[str, str]:
        """By which a Python process runs its code."""
        return {"PYTHONPATH": os.pathsep.join(str(self.folder / each) for each in _CODE)}
