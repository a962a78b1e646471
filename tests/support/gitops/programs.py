"""Programs around GitOps tools' Go code, each from a Go module in a folder beside this file."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from testbed.binaries import BuiltFolder, go


@dataclass(frozen=True)
class GoProgram:
    """A program, built once into the testbed's cache (testbed.binaries)."""

    name: str
    """The name of the module's folder, and so of the program."""

    @property
    def _module(self) -> Path:
        return Path(__file__).with_name(self.name)

    @property
    def _folder(self) -> BuiltFolder:
        return BuiltFolder(f"gitops-{self.name}", self._module, self._make)

    def built(self) -> Path | None:
        """The program; None if it is not built yet."""
        folder = self._folder.built()
        return None if folder is None else folder / self.name

    def build(self) -> Path:
        """Return the program; build it if needed (minutes on two cores).

        Raises: UnavailableError with the end of Go's output.
        """
        return self._folder.build() / self.name

    def _make(self, folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as made:
            go("build", "-trimpath", "-ldflags", "-s -w", "-o", made, ".", module=self._module)
            (Path(made) / self.name).rename(folder / self.name)


def output_of(program: Path, arguments: Iterable[str | Path], text: str) -> str:
    """Return the program's output for that text. Raises: ValueError with its error message."""
    done = subprocess.run(
        [program, *arguments], input=text, capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode != 0:
        raise ValueError(done.stderr.strip())
    return done.stdout
