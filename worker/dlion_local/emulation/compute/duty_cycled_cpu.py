"""Client of the duty-cycle process: sends pid files and quotas. Needs no root."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dlion_api.names import Rank
from dlion_local.emulation.line_process import LineProcess


class DutyCycledCpu:
    """CPU quotas by duty cycle, with the interface of `ControlGroupCpu`."""

    def __init__(self, ranks: Sequence[Rank], work_dir: Path) -> None:
        self._pid_files = {rank: work_dir / f"w{rank}.pid" for rank in ranks}
        self.process = LineProcess("dlion_local.emulation.compute.duty_cycle", work_dir)
        self.failure, self.close = self.process.failure, self.process.close

    def start(self) -> None:
        """Start the duty-cycle process; no worker has a quota yet."""
        for path in self._pid_files.values():
            path.unlink(missing_ok=True)  # left by an earlier run
        self.process.start()
        self.process.call({"pid_files": {r: str(path) for r, path in self._pid_files.items()}})

    def enter_arguments(self, rank: Rank) -> list[str]:
        """Flags for `dlion_local.emulation.network.enter`."""
        return ["--pid-file", str(self._pid_files[rank])]

    def set_quota(self, rank: Rank, cores: float | None) -> None:
        """Set the quota of the processes under the worker's supervisor; None removes it."""
        self.process.call({"rank": rank, "quota_cores": cores})

    def used_s(self, rank: Rank) -> float:
        """CPU seconds of the throttled processes."""
        return float(self.process.call({})["used_s"][str(rank)])

    def throttled_s(self, rank: Rank) -> float:
        """How long the worker has been stopped, in seconds."""
        return float(self.process.call({})["stopped_s"][str(rank)])
