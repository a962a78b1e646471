"""This project at an earlier commit: its chart, its definition, and its code to run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from testbed.binaries import cache_folder

ROOT = Path(__file__).parents[2]
COMMIT = "b99feeff697c"
"""No version is released yet; the first one's tag replaces this commit."""
_CODE = ("api", "operator", "worker")
_KERNELS = "dlion_core.codecs"
"""The module that compiles its kernels on import."""


@dataclass(frozen=True)
class EarlierTree:
    """Files of that commit below a folder."""

    folder: Path

    @classmethod
    def take(cls) -> EarlierTree:
        """Return the tree of `COMMIT`, which stays in the testbeds' cache: its kernels are compiled
        once.

        Skips if the history does not contain that commit.
        """
        folder = cache_folder() / f"earlier-{COMMIT}"
        if folder.exists():
            return cls(folder)
        git = ("git", "-C", str(ROOT))
        known = [*git, "rev-parse", "--verify", "--quiet", f"{COMMIT}^{{commit}}"]
        if not shutil.which("git") or subprocess.run(known, capture_output=True).returncode:
            pytest.skip(f"no commit {COMMIT} here to upgrade from: git fetch --unshallow")
        archive = subprocess.run(
            [*git, "archive", COMMIT, "helm/dlion", "crds", *_CODE], capture_output=True, check=True
        )
        new = folder.with_name(f"{folder.name}.{os.getpid()}")
        new.mkdir(parents=True)
        subprocess.run(["tar", "-x", "-C", str(new)], input=archive.stdout, check=True)
        new.rename(folder)
        made = cls(folder)
        code = [folder / each for each in _CODE]
        for words in (["-m", "compileall", "-q", *map(str, code)], ["-c", f"import {_KERNELS}"]):
            environment = os.environ | made.environment
            subprocess.run([sys.executable, *words], env=environment, check=True)
        return made

    @property
    def chart(self) -> Path:
        """The operator's chart."""
        return self.folder / "helm" / "dlion"

    @property
    def definition(self) -> Path:
        """The definition of DLionJob."""
        return self.folder / "crds" / "dlionjob.yaml"

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a Python process runs its code."""
        return {"PYTHONPATH": os.pathsep.join(str(self.folder / each) for each in _CODE)}
