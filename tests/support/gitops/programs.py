"""Programs around GitOps tools' Go code, each from a Go module in a folder beside this file."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from testbed.binaries import build_once, cache_folder, go, hash_of


@dataclass(frozen=True)
class GoProgram:
    """One of them, built once into the testbed's cache (testbed.binaries)."""

    name: str
    """Of the module's folder, and so of the program."""

    @property
    def _module(self) -> Path:
        return Path(__file__).with_name(self.name)

    @property
    def _path(self) -> Path:
        return cache_folder() / f"gitops-{self.name}-{hash_of(self._module)}" / self.name

    def built(self) -> Path | None:
        """The program; None where it has to be built first."""
        return self._path if self._path.with_name(".complete").exists() else None

    def build(self) -> Path:
        """The program, built now if need be (minutes on two cores; then nothing).

        Raises: UnavailableError with the end of what Go said.
        """
        build_once(self._path.parent, self._make)
        return self._path

    def _make(self, folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as made:
            go("build", "-trimpath", "-ldflags", "-s -w", "-o", made, ".", module=self._module)
            (Path(made) / self.name).rename(folder / self.name)


def said(program: Path, arguments: Iterable[str | Path], text: str) -> str:
    """What it says, given that text. Raises: ValueError with what it finds wrong."""
    done = subprocess.run(
        [program, *arguments], input=text, capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode != 0:
        raise ValueError(done.stderr.strip())
    return done.stdout
