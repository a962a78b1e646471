"""The one evaluator of a local run, where quotas make evaluating in the trainers too dear.

Called by the runner. Owns the folder of snapshots, the process and the reading of its records. A
worker with a tenth of a core would spend seconds of its training on each evaluation; the machine
has the time outside the quotas.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from dlion_api.progress import ProgressRecord
from dlion_api.records import record_from_json
from dlion_api.spec import Job
from dlion_worker.environments.plan import Plan
from dlion_worker.evaluator import RECORDS
from dlion_worker.local.processes import ProcessGroup

NAME = "evaluator"


class SharedEvaluator:
    """Evaluates all replicas of one run; does nothing where each trainer does it itself."""

    def __init__(
        self, job: Job, plan: Plan, work_dir: Path, take: Callable[[ProgressRecord], None]
    ) -> None:
        """`take` is given every record, in the runner's thread."""
        dataset = job.spec.trainer.dataset
        # A program's own `load_data` may give each worker another held-out split.
        shared = dataset.name is not None or dataset.path is not None
        self.folder = work_dir / "snapshots" if plan.limits_cpu and shared else None
        self._take = take
        self._read_bytes = 0

    def start(self, group: ProcessGroup, config_path: Path) -> None:
        """Starts the process, with the configuration of any worker."""
        if self.folder is None:
            return
        self.folder.mkdir()
        command = [sys.executable, "-m", "dlion_worker.evaluator", "--config", str(config_path)]
        group.start(NAME, [*command, "--snapshots", str(self.folder)])

    def poll(self) -> None:
        """Hands over the records that have been written since the last call."""
        if self.folder is None or not (self.folder / RECORDS).exists():
            return
        with (self.folder / RECORDS).open("rb") as file:
            file.seek(self._read_bytes)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read_bytes += len(whole) + len(newline)
        for line in whole.splitlines():
            self._take(record_from_json(line.decode()))
