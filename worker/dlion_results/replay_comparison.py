"""Compares a recorded run with its replay, from their records.

Time counts from the first step, as in the summary: a simulated run has no start-up.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dlion_api.names import Rank
from dlion_api.protocol.progress import LinkRecord, ProgressRecord
from dlion_api.status_names import ACCURACY
from dlion_results.summary.accuracy_name import common_name, goal_text
from dlion_results.summary.curves import mean_over_replicas
from dlion_results.summary.summary import LEVELS, level_reached
from dlion_results.summary.tally import RunTally, training_s

KILO = 1000


@dataclass(frozen=True)
class RunFigures:
    """Figures of one run; accuracy is the mean over replicas."""

    seconds: float
    steps_per_s: float
    """Mean over workers."""
    accuracy: float | None
    time_to_s: dict[float, float | None]
    bytes_per_step: dict[tuple[int, int], float]
    """By (sender, receiver), over the sender's steps for which the link was reported."""
    batch: dict[int, float]
    """Mean local batch size by rank."""
    accuracy_name: str = ACCURACY


@dataclass(frozen=True)
class ReplayFigure:
    """One row of the comparison; None if not reached, or nothing was sent."""

    name: str
    unit: str
    recorded: float | None
    replayed: float | None

    @property
    def difference(self) -> float | None:
        """Relative to the recorded value."""
        if self.recorded is None or self.replayed is None or not self.recorded:
            return None
        return self.replayed / self.recorded - 1

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "difference": self.difference}


def replay_figures(records: Iterable[ProgressRecord], ranks: Sequence[Rank]) -> RunFigures:
    """The figures of one run, computed as for its `summary.json`."""
    tally = RunTally(ranks)
    sent: dict[tuple[int, int], int] = defaultdict(int)
    counted: dict[tuple[int, int], int] = {}  # an aborted run did not report its last links
    for record in records:
        if record.rank not in tally.workers:
            continue
        tally.add(record)
        if isinstance(record, LinkRecord):
            link = (record.rank, record.peer)
            sent[link] += record.sent_bytes
            counted[link] = tally.workers[record.rank].steps
    workers = list(tally.workers.values())
    seconds = training_s(workers)
    mean = mean_over_replicas([worker.accuracy_curve.points() for worker in workers])
    return RunFigures(
        seconds=seconds,
        steps_per_s=sum(w.steps for w in workers) / len(ranks) / seconds if seconds else 0.0,
        accuracy=float(mean[-1, 1]) if len(mean) else None,
        time_to_s={
            level: level_reached(workers, level, workers)["training_time_s"] for level in LEVELS
        },
        bytes_per_step={link: sent[link] / count for link, count in counted.items() if count},
        batch={worker.rank: worker.samples / worker.steps for worker in workers if worker.steps},
        accuracy_name=common_name(
            worker.last_evaluation.accuracy_name for worker in workers if worker.last_evaluation
        ),
    )


def compare_figures(recorded: RunFigures, replayed: RunFigures) -> list[ReplayFigure]:
    """All figures of both runs, in display order."""
    name = recorded.accuracy_name
    rows = [
        ReplayFigure("time of training", "s", recorded.seconds, replayed.seconds),
        ReplayFigure("iterations/s", "", recorded.steps_per_s, replayed.steps_per_s),
        ReplayFigure(f"{name} at the end", name, recorded.accuracy, replayed.accuracy),
    ]
    for level in LEVELS:
        times = (recorded.time_to_s.get(level), replayed.time_to_s.get(level))
        if times != (None, None):
            rows.append(ReplayFigure(f"time to {goal_text(level, name)}", "s", *times))
    for rank in sorted({*recorded.batch, *replayed.batch}):
        sizes = (recorded.batch.get(rank), replayed.batch.get(rank))
        rows.append(ReplayFigure(f"batch of worker {rank}", "", *sizes))
    links = sorted({*recorded.bytes_per_step, *replayed.bytes_per_step})
    for link in links:
        sizes = (recorded.bytes_per_step.get(link, 0.0), replayed.bytes_per_step.get(link, 0.0))
        sent = f"sent per iteration, {link[0]} to {link[1]}"
        rows.append(ReplayFigure(sent, "kB", *(size / KILO for size in sizes)))
    return rows
