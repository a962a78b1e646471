"""Loads result folders for the report.

Aggregates events again, so that the page also shows a run that was killed or is still running.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from dlion_api.errors import DataError
from dlion_api.names import Rank
from dlion_api.protocol.progress import EvaluationRecord, StepRecord
from dlion_api.remaining_time import Remaining, RemainingTime
from dlion_api.spec import Job
from dlion_results.report.formats import without_queries
from dlion_results.report.stored_files import (
    read_environment,
    read_summary,
    stored_ending,
    stored_scalability,
)
from dlion_results.run_folder.environment import EnvironmentReport
from dlion_results.run_folder.events import read_events
from dlion_results.run_folder.layout import EVENTS
from dlion_results.run_folder.manifest import read_job_and_text
from dlion_results.run_folder.models import read_models
from dlion_results.run_folder.stored_values import text_of
from dlion_results.summary.accuracy_name import accuracy_name
from dlion_results.summary.curves import Points, mean_over_replicas
from dlion_results.summary.summary import Json, scalability, summarise
from dlion_results.summary.tally import (
    RunTally,
    WorkerTally,
    first_step_s,
    trusted_workers,
)


@dataclass(frozen=True)
class LoadedRun:
    """One run, ready to be drawn."""

    label: str
    job: Job
    tally: RunTally
    summary: Json
    environment: EnvironmentReport | None
    job_text: str
    """The manifest with its defaults, as in `job.yaml`, without the queries of URLs."""
    bad_lines: tuple[str, ...] = ()
    reference: str | None = None
    """Label of the reference run for its speed-up."""
    remaining: Remaining | None = None
    """Remaining time of a run in progress, from its newest step; None: not requested."""

    @cached_property
    def workers(self) -> list[WorkerTally]:
        """Workers by rank."""
        return [self.tally.workers[rank] for rank in sorted(self.tally.workers)]

    @cached_property  # taken for every bar, dot and line
    def began_s(self) -> float:
        """Start of the first step of any worker, the zero of the page's time axes."""
        return first_step_s(self.workers) or 0.0

    @property
    def length_s(self) -> float:
        """Time from the first step to the last record."""
        return max(0.0, self.tally.end_s - self.began_s)

    @cached_property
    def sites(self) -> dict[Rank, str]:
        """The site of each worker in the manifest."""
        return {worker.rank: str(worker.site) for worker in self.job.workers()}

    @cached_property
    def _names(self) -> dict[Rank, str]:
        return {worker.rank: worker.name for worker in self.job.workers()}

    def worker_name(self, rank: Rank) -> str:
        """Short name of that worker, or its rank if the manifest has no such worker."""
        return self._names.get(rank, f"worker {rank}")

    @property
    def accuracy_name(self) -> str:
        """What people read in place of "accuracy"."""
        return accuracy_name(self.summary)

    def mean_accuracy(self) -> Points:
        """Mean over the replicas that count against time, shape [T, 2]."""
        return mean_over_replicas(
            [worker.accuracy_curve.points() for worker in trusted_workers(self.workers)]
        )


def common_target(runs: Sequence[LoadedRun]) -> float | None:
    """The target accuracy of all these runs; None if they have several, or none."""
    target, *others = {run.job.spec.trainer.stop.target_accuracy for run in runs}
    return None if others else target


def load_runs(
    folders: Sequence[Path], labels: Sequence[str] = (), *, reference: str | None = None
) -> list[LoadedRun]:
    """Load the runs of these folders.

    Their speed-up is relative to the run labelled `reference`, or else to the first with one
    worker. Raises DataError if a folder holds no run, or no run of one worker has that label.
    """
    names = list(map(text_of, labels)) or _labels(folders)
    runs = [load_run(folder, label) for folder, label in zip(folders, names, strict=True)]
    alone = _reference(runs, reference if reference is None else text_of(reference))
    if alone is not None:
        for place, run in enumerate(runs):
            if len(run.summary["workers"]) > 1:
                own = {**run.summary, "scalability": scalability(run.summary, alone.summary)}
                runs[place] = replace(run, summary=own, reference=alone.label)
    return runs


def _reference(runs: Sequence[LoadedRun], label: str | None) -> LoadedRun | None:
    alone = [run for run in runs if len(run.summary["workers"]) == 1]
    if label is None:
        return next(iter(alone), None)
    for run in alone:
        if run.label == label:
            return run
    allowed = ", ".join(repr(run.label) for run in alone) or "none, as no run here has one worker"
    raise DataError(
        f"report: the reference for the speed-up must be a run of one worker (given: {label!r}; "
        f"allowed: {allowed})"
    )


def load_run(folder: Path, label: str, *, is_running: bool = False) -> LoadedRun:
    """Load one run; predict its end if it is running. Raises DataError if the folder holds none."""
    job, job_text = read_job_and_text(folder)
    tally = RunTally(worker.rank for worker in job.workers())
    bad_lines: list[str] = []
    remaining = RemainingTime(job.spec) if is_running else None
    for record in read_events(folder / EVENTS, bad_lines.append):
        tally.add(record)
        if remaining is not None and isinstance(record, StepRecord | EvaluationRecord):
            remaining.take(record)
    stored, environment = read_summary(folder), read_environment(folder)
    summary = summarise(
        job,
        tally,
        ending=stored_ending(stored),
        models=read_models(folder),
        environment=environment,
        bad_line_count=len(bad_lines),
    )
    summary["scalability"] = stored_scalability(stored)
    return LoadedRun(
        label, job, tally, summary, environment, without_queries(job_text), tuple(bad_lines),
        remaining=None if remaining is None else remaining.predict(),
    )  # fmt: skip


def _labels(folders: Sequence[Path]) -> list[str]:
    """Folder names, with as many parent folders as needed to make them unique.

    A folder that is given twice is numbered. A name that is not text has replacements.
    """
    paths = [tuple(map(text_of, folder.resolve().parts)) for folder in folders]
    for count in range(1, max(map(len, paths), default=0) + 1):
        names = ["/".join(parts[-count:]) for parts in paths]
        if len(set(names)) == len(set(paths)):
            break
    else:
        return []
    twice, used = Counter(names), set(names)
    for place, name in enumerate(names):
        if twice[name] > 1:
            numbered = (f"{name} ({number})" for number in itertools.count(1))
            names[place] = next(each for each in numbered if each not in used)
            used.add(names[place])
    return names
