"""The runner's side of the duty cycle: pid files, and quotas told to the process.

Driven by `local.imposed`; needs no root.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlion_api.errors import UnavailableError
from dlion_api.names import Rank
from dlion_worker.local.line_process import LineProcess


@dataclass
class DutyCycledCpu:
    """Quotas held by stopping and continuing; the same surface as `ControlGroupCpu`."""

    ranks: Sequence[Rank]
    work_dir: Path
    _process: LineProcess | None = None

    def start(self) -> None:
        """Start the process that will hold the workers, once they have quotas."""
        self.work_dir.mkdir(parents=True, exist_ok=True)
        config = self.work_dir / "duty_cycle.json"
        pid_files = {rank: str(self._pid_file(rank)) for rank in self.ranks}
        for rank in self.ranks:
            self._pid_file(rank).unlink(missing_ok=True)  # of an earlier run in this folder
        config.write_text(json.dumps({"pid_files": pid_files}), encoding="utf-8")
        self._process = LineProcess(
            "dlion_worker.local.duty_cycle",
            "--config",
            str(config),
            errors_path=self.work_dir / "duty_cycle.log",
        )

    def _pid_file(self, rank: Rank) -> Path:
        return self.work_dir / f"w{rank}.pid"

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            raise UnavailableError("the duty cycle is not there: start() comes first")
        return self._process.ask(request)

    @property
    def pid(self) -> int:
        """Process id of the duty cycle."""
        if self._process is None:
            raise UnavailableError("the duty cycle is not there: start() comes first")
        return self._process.pid

    def enter_arguments(self, rank: Rank) -> list[str]:
        """Flags for `dlion_worker.local.enter`."""
        return ["--pid-file", str(self._pid_file(rank))]

    def set_quota(self, rank: Rank, cores: float | None) -> None:
        """Hold what the worker's supervisor has started at so many cores; None lets go."""
        self._ask({"rank": rank, "quota_cores": cores})

    def used_s(self, rank: Rank) -> float:
        """CPU seconds of what is held."""
        return float(self._ask({})["used_s"][str(rank)])

    def throttled_s(self, rank: Rank) -> float:
        """How long the worker has been stopped."""
        return float(self._ask({})["stopped_s"][str(rank)])

    def failure(self) -> str:
        """What is wrong with the duty cycle; empty where nothing is."""
        if self._process is not None and self._process.ended():
            return "the duty cycle process has ended: see duty_cycle.log in the run's work folder"
        return ""

    def close(self) -> None:
        """Continue everyone and end the process. Safe to call twice."""
        if self._process is not None:
            self._process.close()
            self._process = None
