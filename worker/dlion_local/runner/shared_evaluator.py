"""One shared evaluator for a local run with CPU quotas.

Evaluating in a trainer with a tenth of a core would take seconds of its training time. The
evaluator runs outside the quotas. Owns the snapshot folder, the process and the reading of its
records.
"""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dlion_api.errors import ContractError
from dlion_api.protocol.progress import ProgressRecord
from dlion_api.protocol.records import record_from_json
from dlion_api.spec import Dataset, Job
from dlion_api.spec.dataset import PATH_PLACEHOLDERS
from dlion_environments.plan import Plan
from dlion_local.runner.processes import ProcessGroup
from dlion_worker.evaluator import RECORDS_FILE

log = logging.getLogger(__name__)

NAME = "evaluator"


def has_common_held_out_samples(dataset: Dataset) -> bool:
    """Whether all workers hold out the same samples, so that one process can evaluate all replicas.

    A program's own `load_data` may differ between workers, and so may a path with placeholders.
    """
    decides = dataset.evaluation_path or dataset.path
    if decides is None:
        return dataset.name is not None
    return not any(placeholder in decides for placeholder in PATH_PLACEHOLDERS)


class SharedEvaluator:
    """Evaluates all replicas of one run; inactive if each trainer evaluates itself."""

    def __init__(
        self, job: Job, plan: Plan, work_dir: Path, take: Callable[[ProgressRecord], None]
    ) -> None:
        """`take` receives every record, in the runner's thread."""
        shared = plan.limits_cpu and has_common_held_out_samples(job.spec.trainer.dataset)
        self.folder = work_dir / "snapshots" if shared else None
        self._take = take
        self._read_bytes = 0

    def start(self, group: ProcessGroup, config_path: str) -> None:
        """Start or restart the process, with the configuration of any worker."""
        if self.folder is None:
            return
        self.folder.mkdir(exist_ok=True)
        self.poll()
        with suppress(FileNotFoundError):  # no earlier process
            os.truncate(self.folder / RECORDS_FILE, self._read_bytes)  # its partial line
        arguments = ["--config", config_path, "--snapshots", str(self.folder)]
        group.fork(NAME, "dlion_worker.evaluator", arguments)

    def poll(self) -> None:
        """Forward the records written since the last call."""
        if self.folder is None or not (self.folder / RECORDS_FILE).exists():
            return
        with (self.folder / RECORDS_FILE).open("rb") as file:
            file.seek(self._read_bytes)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read_bytes += len(whole) + len(newline)
        for line in whole.splitlines():
            try:
                record = record_from_json(line)
            except ContractError as error:
                log.warning("ignoring a record of the evaluator: %s", error)
                continue
            self._take(record)
