"""The command that continues a run, to be printed at its end."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlion_cli.inputs.manifests import STDIN
from dlion_results.run_folder.folder import JOB
from dlion_results.run_folder.resume_checks import CHECKPOINTS


@dataclass(frozen=True)
class ResumeCommand:
    """The options of `dlion run` that a resumed run needs again."""

    file: Path
    environment: str | None = None
    assignments: Sequence[str] = ()
    data_root: Path = Path()
    unprivileged: bool = False

    def command_line(self, folder: Path) -> str:
        """The command that continues in that result folder; empty if it has no checkpoint."""
        if not any(folder.glob(CHECKPOINTS)):
            return ""
        file = folder / JOB if str(self.file) == STDIN else self.file
        command_line = ["dlion", "run", str(file), "--resume", str(folder)]
        if self.environment is not None:
            command_line += ["--environment", self.environment]
        for assignment in self.assignments:
            command_line += ["--set", assignment]
        if self.data_root != Path():
            command_line += ["--data-root", str(self.data_root)]
        if self.unprivileged:
            command_line.append("--unprivileged")
        return shlex.join(command_line)
