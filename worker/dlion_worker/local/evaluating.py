"""The one evaluator of a local run, where quotas make evaluating in the trainers too dear.

Called by the runner. Owns the folder of snapshots, the process and the reading of its records. A
worker with a tenth of a core would spend seconds of its training on each evaluation; the machine
has the time outside the quotas.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

from dlion_api.errors import ContractError
from dlion_api.progress import ProgressRecord
from dlion_api.records import record_from_json
from dlion_api.spec import Dataset, Job
from dlion_api.spec.dataset import PATH_PLACEHOLDERS
from dlion_worker.environments.plan import Plan
from dlion_worker.evaluator import RECORDS
from dlion_worker.local.processes import ProcessGroup

log = logging.getLogger(__name__)

NAME = "evaluator"


def same_held_out(dataset: Dataset) -> bool:
    """Whether all workers hold out the same samples, so that one process can judge all replicas.

    A program's own `load_data` may give each worker others, and so may a path with placeholders:
    that of the held-out samples, or without one that of the samples they are split off.
    """
    decides = dataset.evaluation_path or dataset.path
    if decides is None:
        return dataset.name is not None
    return not any(placeholder in decides for placeholder in PATH_PLACEHOLDERS)


class SharedEvaluator:
    """Evaluates all replicas of one run; does nothing where each trainer does it itself."""

    def __init__(
        self, job: Job, plan: Plan, work_dir: Path, take: Callable[[ProgressRecord], None]
    ) -> None:
        """`take` is given every record, in the runner's thread."""
        shared = plan.limits_cpu and same_held_out(job.spec.trainer.dataset)
        self.folder = work_dir / "snapshots" if shared else None
        self._take = take
        self._read_bytes = 0

    def start(self, group: ProcessGroup, config_path: Path) -> None:
        """Starts the process, or one in its place, with the configuration of any worker."""
        if self.folder is None:
            return
        self.folder.mkdir(exist_ok=True)
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
            try:
                record = record_from_json(line)
            except ContractError as error:  # torn, by an evaluator that was killed
                log.warning("a record of the evaluator is left out: %s", error)
                continue
            self._take(record)
