"""The command with which a run goes on, word for word, for the terminal's last line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlion_cli.manifests import STDIN
from dlion_worker.results.folder import JOB
from dlion_worker.results.resuming import CHECKPOINTS


@dataclass(frozen=True)
class ResumeCommand:
    """What `dlion run` was given, as far as it is to be given again."""

    file: Path
    environment: str | None = None
    assignments: Sequence[str] = ()
    data_root: Path = Path()
    unprivileged: bool = False

    def words(self, folder: Path) -> str:
        """The command that goes on in that result folder; empty: it holds no checkpoint."""
        if not any(folder.glob(CHECKPOINTS)):
            return ""
        file = folder / JOB if str(self.file) == STDIN else self.file
        words = ["dlion", "run", str(file), "--resume", str(folder)]
        if self.environment is not None:
            words += ["--environment", self.environment]
        for assignment in self.assignments:
            words += ["--set", assignment]
        if self.data_root != Path():
            words += ["--data-root", str(self.data_root)]
        if self.unprivileged:
            words.append("--unprivileged")
        return shlex.join(words)
