"""Client of the duty-cycle process: writes its configuration and sends quotas. Needs no root."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlion_api.errors import UnavailableError
from dlion_api.names import Rank
from dlion_local.emulation.line_process import LineProcess


@dataclass
class DutyCycledCpu:
    """CPU quotas by duty cycle, with the interface of `ControlGroupCpu`."""

    ranks: Sequence[Rank]
    work_dir: Path
    _process: LineProcess | None = None

    def start(self) -> None:
        """Start the duty-cycle process; no worker has a quota yet."""
        self.work_dir.mkdir(parents=True, exist_ok=True)
        config = self.work_dir / "duty_cycle.json"
        pid_files = {rank: str(self._pid_file(rank)) for rank in self.ranks}
        for rank in self.ranks:
            self._pid_file(rank).unlink(missing_ok=True)  # left by an earlier run
        config.write_text(json.dumps({"pid_files": pid_files}), encoding="utf-8")
        self._process = LineProcess(
            "dlion_local.emulation.compute.duty_cycle",
            "--config",
            str(config),
            errors_path=self.work_dir / "duty_cycle.log",
        )

    def _pid_file(self, rank: Rank) -> Path:
        return self.work_dir / f"w{rank}.pid"

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            raise UnavailableError("the duty cycle is not running: call start() first")
        return self._process.call(request)

    @property
    def pid(self) -> int:
        """Process id of the duty cycle."""
        if self._process is None:
            raise UnavailableError("the duty cycle is not running: call start() first")
        return self._process.pid

    def enter_arguments(self, rank: Rank) -> list[str]:
        """Flags for `dlion_local.emulation.network.enter`."""
        return ["--pid-file", str(self._pid_file(rank))]

    def set_quota(self, rank: Rank, cores: float | None) -> None:
        """Set the quota of the processes under the worker's supervisor; None removes it."""
        self._call({"rank": rank, "quota_cores": cores})

    def used_s(self, rank: Rank) -> float:
        """CPU seconds of the throttled processes."""
        return float(self._call({})["used_s"][str(rank)])

    def throttled_s(self, rank: Rank) -> float:
        """How long the worker has been stopped, in seconds."""
        return float(self._call({})["stopped_s"][str(rank)])

    def failure(self) -> str:
        """Why the duty cycle does not work; empty if it does."""
        if self._process is not None and self._process.ended():
            return "the duty cycle process has ended: see duty_cycle.log in the run's work folder"
        return ""

    def close(self) -> None:
        """Continue all processes and end the duty cycle. May be called twice."""
        if self._process is not None:
            self._process.close()
            self._process = None
