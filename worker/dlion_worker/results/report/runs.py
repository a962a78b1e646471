"""Result folders as the report sees them.

Owns loading: events are added up again, so that the page of a run that was killed, or still goes
on, shows all that there is. Draws nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dlion_api.errors import DataError
from dlion_worker.results.curves import Points, mean_over_replicas
from dlion_worker.results.description import RunDescription, describe_folder
from dlion_worker.results.environment import EnvironmentReport
from dlion_worker.results.events import BadLine, read_events
from dlion_worker.results.folder import EVENTS, JOB
from dlion_worker.results.models import read_models
from dlion_worker.results.report.written import (
    ending_of,
    read_environment,
    read_summary,
    scalability_of,
)
from dlion_worker.results.summary import Json, scalability, summarise
from dlion_worker.results.tally import RunTally, WorkerTally

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class LoadedRun:
    """One run, ready to be drawn."""

    label: str
    run: RunDescription
    tally: RunTally
    summary: Json
    environment: EnvironmentReport | None
    job_text: str
    """The manifest with its defaults, as in `job.yaml`."""
    bad_lines: tuple[BadLine, ...] = ()
    reference: str | None = None
    """Label of the run that its speed-up is told against."""

    @property
    def workers(self) -> list[WorkerTally]:
        """Workers by rank."""
        return [self.tally.workers[rank] for rank in sorted(self.tally.workers)]

    def mean_accuracy(self) -> Points:
        """Mean over replicas against time, shape [T, 2]."""
        return mean_over_replicas([worker.accuracy_curve.points() for worker in self.workers])


def load_runs(
    folders: Sequence[Path], labels: Sequence[str] = (), *, reference: str | None = None
) -> list[LoadedRun]:
    """The runs in their folders, their speed-up told against the run labelled `reference`, or else
    against the first that has one worker.

    Raises: DataError when a folder holds no run, or no run of one worker is labelled so.
    """
    names = list(labels) or _labels(folders)
    runs = [load_run(folder, label) for folder, label in zip(folders, names, strict=True)]
    alone = _reference(runs, reference)
    return runs if alone is None else [_told_against(alone, run) for run in runs]


def _reference(runs: Sequence[LoadedRun], label: str | None) -> LoadedRun | None:
    alone = [run for run in runs if len(run.summary["workers"]) == 1]
    if label is None:
        return next(iter(alone), None)
    for run in alone:
        if run.label == label:
            return run
    allowed = ", ".join(repr(run.label) for run in alone) or "none, as no run here has one worker"
    raise DataError(
        f"report: speed-up is told against a run of one worker, and none is labelled so (given: "
        f"{label!r}; allowed: {allowed})"
    )


def _told_against(reference: LoadedRun, run: LoadedRun) -> LoadedRun:
    if len(run.summary["workers"]) <= 1:
        return run
    told = {**run.summary, "scalability": scalability(run.summary, reference.summary)}
    return replace(run, summary=told, reference=reference.label)


def load_run(folder: Path, label: str) -> LoadedRun:
    """One run. Raises: DataError when the folder holds none."""
    run = describe_folder(folder)
    tally = RunTally(worker.rank for worker in run.workers)
    bad_lines: list[BadLine] = []
    for record in read_events(folder / EVENTS, bad_lines.append):
        tally.add(record)
    written = read_summary(folder)
    summary = summarise(
        run,
        tally,
        ending=ending_of(written),
        models=read_models(folder),
        bad_line_count=len(bad_lines),
    )
    summary["scalability"] = scalability_of(written)
    environment = read_environment(folder)
    job_text = (folder / JOB).read_text("utf-8")
    return LoadedRun(label, run, tally, summary, environment, job_text, tuple(bad_lines))


def _labels(folders: Sequence[Path]) -> list[str]:
    """Folder names; where two are alike, with as many of the folders above as tell all apart.

    The same folder given twice is numbered.
    """
    paths = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, paths), default=0) + 1):
        names = ["/".join(parts[-count:]) for parts in paths]
        if len(set(names)) == len(set(paths)):
            break
    else:
        return []
    twice = Counter(names)
    seen: Counter[str] = Counter()
    for place, name in enumerate(names):
        seen[name] += 1
        if twice[name] > 1:
            names[place] = f"{name} ({seen[name]})"
    return names
