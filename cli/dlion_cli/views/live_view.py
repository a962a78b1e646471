"""The live view of `dlion run` and `dlion simulate`.

On a terminal it updates twice a second; otherwise it prints a line at intervals. `worker_rows`
computes the figures; `table` prints the final result.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from dlion_api.protocol.progress import EvaluationRecord, EventRecord, ProgressRecord, StepRecord
from dlion_api.reasons import EventReason
from dlion_api.remaining_time import RemainingTime
from dlion_api.spec import Job
from dlion_cli.terminal.formatting import (
    UNKNOWN,
    format_bytes,
    format_duration,
    format_rate,
    format_remaining,
    format_way,
    printable,
)
from dlion_cli.views.link_table import link_table, links_cell, links_columns, sparkline
from dlion_cli.views.terminal_view import TerminalView
from dlion_cli.views.worker_rows import WorkerDisplayState, WorkerRow
from dlion_results.run_folder.description import worker_name
from dlion_results.summary.accuracy_name import accuracy_text, common_name

LINE_INTERVAL_S = 10.0
"""Between two lines if output is not a terminal."""
_EVENT_COUNT = 5
_FOLD_S = 3.0
"""How long a worker's failure waits for equal ones if output is not a terminal."""
_MAX_NAMED = 4
_ROW_COLUMNS = 100
"""Width of a worker's row with total and sparkline, without links."""
_OTHER_LINES = 5
"""Height without workers and links: two lines of figures, headings, one event."""
_STYLES = {
    WorkerDisplayState.STARTING: "dim",
    WorkerDisplayState.TRAINING: "green",
    WorkerDisplayState.WAITING: "yellow",
    WorkerDisplayState.LOST: "bold red",
    WorkerDisplayState.QUARANTINED: "bold red",
    WorkerDisplayState.FINISHED: "cyan",
}


_RUNNING = {WorkerDisplayState.TRAINING, WorkerDisplayState.WAITING}
"""States of workers that have not stopped."""


class _ShownEvent:
    """An event as one line, also of other workers that failed with the same message."""

    def __init__(self, record: EventRecord) -> None:
        self.record, self.ranks = record, [record.rank]

    def takes(self, record: EventRecord) -> bool:
        """Add the worker if its failure is the same; return whether it is."""
        is_same = record.reason == self.record.reason and record.message == self.record.message
        is_folded = is_same and record.reason == EventReason.WORKER_FAILED
        if is_folded and record.rank not in self.ranks:
            self.ranks.append(record.rank)
        return is_folded


class LiveView(TerminalView):
    """Shows a run while it lasts. `update` is thread-safe."""

    def __init__(
        self,
        job: Job,
        console: Console,
        *,
        environment: str = "",
        is_virtual: bool = False,
        elapsed_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_virtual`: records have virtual time, which passes only with them. `elapsed_s`: the
        duration so far of a run that is resumed."""
        self._job, self._stop = job, job.spec.trainer.stop
        self._environment, self._is_virtual = environment, is_virtual
        self._clock = clock
        self._started_s = clock() - elapsed_s
        self._line_due_s = clock() + LINE_INTERVAL_S
        self._lock = threading.Lock()
        self._rows = {w.rank: WorkerRow(w.rank, w.name) for w in job.workers()}
        self._remaining = RemainingTime(job.spec)
        self._events: deque[_ShownEvent] = deque(maxlen=_EVENT_COUNT)
        self._unprinted: _ShownEvent | None = None
        self._print_due_s = 0.0
        self._newest_s, self._newest_at_s = elapsed_s, clock()
        super().__init__(console, redirect_stdout=False, redirect_stderr=False)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if not self._console.is_terminal:
            with self._lock:
                last = self._take_unprinted()
            self._print_events(last)
            self._console.print(self.line(), highlight=False, soft_wrap=True)

    def update(self, record: ProgressRecord) -> None:
        """Add one record of any worker."""
        with self._lock:
            row = self._rows.get(record.rank)
            if row is not None:
                row.add(record)
                if isinstance(record, StepRecord | EvaluationRecord):
                    self._remaining.take(record)
            if record.time_s > self._newest_s:
                self._newest_s, self._newest_at_s = record.time_s, self._clock()
            if isinstance(record, EventRecord) and not (
                self._events and self._events[-1].takes(record)
            ):
                self._events.append(_ShownEvent(record))
            due = [] if self._console.is_terminal else self._due_events(record)
        if self._console.is_terminal:
            return
        self._print_events(due)
        if self._clock() >= self._line_due_s:
            self._line_due_s = self._clock() + LINE_INTERVAL_S
            self._console.print(self.line(), highlight=False, soft_wrap=True)

    def render(self) -> RenderableType:
        """The live view."""
        with self._lock:
            parts: list[RenderableType] = [self._header(), self._table()]
            lines = _OTHER_LINES + len(self._rows)
            if self._has_link_table():
                parts.append(link_table(self._rows))
                lines += len(self._rows)
            shown = max(1, self._console.height - lines)
            parts.extend(self._event_line(event) for event in [*self._events][-shown:])
            return Group(*parts)

    def line(self) -> str:
        """The state in one line, for logs."""
        with self._lock:
            rows = [row for row in self._rows.values() if row.steps_per_s is not None]
            states = [row.state(self._now_s()) for row in self._rows.values()]
            parts = [f"{format_duration(self._clock() - self._started_s)} elapsed"]
            if rows:
                steps = sorted(row.iteration for row in rows)
                parts += [
                    f"step {steps[0]:,}" + (f" to {steps[-1]:,}" if steps[-1] > steps[0] else ""),
                    f"loss {_mean_text(row.loss for row in rows)}",
                    self._accuracy(),
                    f"{format_rate(sum(row.samples_per_s or 0 for row in rows))} samples/s",
                    f"{format_bytes(sum(row.sent_bytes for row in rows))} sent",
                ]
            if {*states} - {WorkerDisplayState.QUARANTINED} != {WorkerDisplayState.FINISHED}:
                parts.insert(1, self._way())
            counts = [
                f"{states.count(state)} {state}" for state in WorkerDisplayState if state in states
            ]
            return ", ".join([*parts, *counts])

    def _due_events(self, record: ProgressRecord) -> list[_ShownEvent]:
        """The events to print now. A worker's failure waits for equal ones, for `_FOLD_S`."""
        due = self._take_unprinted() if self._clock() >= self._print_due_s else []
        if not isinstance(record, EventRecord) or not record.warning:
            return due
        if self._unprinted is not None and self._unprinted.takes(record):
            return due
        due += self._take_unprinted()
        if record.reason != EventReason.WORKER_FAILED:
            return [*due, _ShownEvent(record)]
        self._unprinted, self._print_due_s = _ShownEvent(record), self._clock() + _FOLD_S
        return due

    def _take_unprinted(self) -> list[_ShownEvent]:
        taken, self._unprinted = self._unprinted, None
        return [] if taken is None else [taken]

    def _print_events(self, events: Iterable[_ShownEvent]) -> None:
        for event in events:
            self._console.print(self._event_line(event), soft_wrap=True)

    def _now_s(self) -> float:
        """The run's current time, extrapolated from the newest record."""
        passed_s = 0.0 if self._is_virtual else self._clock() - self._newest_at_s
        return self._newest_s + passed_s

    def _header(self) -> Text:
        key = self._job.key
        header = Text()
        header.append(f"{key.name}", style="bold")
        header.append(f"  {key.namespace}, run {printable(key.run_id)}", style="dim")
        if self._environment:
            header.append(f"  ·  {printable(self._environment)}")
        header.append(f"  ·  {format_duration(self._clock() - self._started_s)} elapsed")
        header.append(f"  ·  {self._way()}")
        header.append(f"  ·  {self._accuracy()}")
        if self._stop.target_accuracy:
            goal = accuracy_text(self._stop.target_accuracy, self._accuracy_name())
            header.append(f" of {goal}")
        return header

    def remaining(self) -> str:
        """The time that is left until the first end that can be predicted; — if there is none.

        `≤` if another condition (an accuracy) may end the run earlier.
        """
        predicted = self._remaining.predict(self._now_s())
        return format_remaining(
            predicted.seconds, predicted.target_s, has_target=predicted.has_target
        )

    def _way(self) -> str:
        """The progress of the run, or past its stop, the workers whose step or exchange still
        runs."""
        now_s = self._now_s()
        predicted = self._remaining.predict(now_s)
        running = [row.name for row in self._rows.values() if row.state(now_s) in _RUNNING]
        if not (running and predicted.is_reached):
            return format_way(predicted, is_virtual=self._is_virtual)
        more = f" and {len(running) - _MAX_NAMED} more" * (len(running) > _MAX_NAMED)
        return (
            f"stop reached, waits for a step or exchange of {', '.join(running[:_MAX_NAMED])}{more}"
        )

    def _accuracy(self) -> str:
        counted = [row.accuracy for row in self._rows.values() if not row.is_quarantined]
        known = [accuracy for accuracy in counted if accuracy is not None]
        name = self._accuracy_name()
        if not known:
            return f"{name} {UNKNOWN}"
        values = (sum(known) / len(known), min(known), max(known))
        mean, least, most = (accuracy_text(value, name) for value in values)
        return f"{name} {mean}{f' ({least} to {most})' if len(known) > 1 else ''}"

    def _accuracy_name(self) -> str:
        evaluated = [row for row in self._rows.values() if row.accuracy is not None]
        return common_name(row.accuracy_name for row in evaluated)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold dim", expand=False)
        for title in ("worker", "state"):
            table.add_column(title, no_wrap=True)
        for title in ("step", "loss", self._accuracy_name(), "batch", "samples/s", "sent/s"):
            table.add_column(title, justify="right", no_wrap=True)
        if self._is_wide():
            table.add_column("sent", justify="right", no_wrap=True)
            table.add_column("", no_wrap=True)
            table.add_column("per link and s")  # the only column that shrinks
        for row in self._rows.values():
            cells = self._cells(row)
            table.add_row(*cells[: len(table.columns)])
        return table

    def _is_wide(self) -> bool:
        """Whether links fit into the workers' rows."""
        return self._console.width >= _ROW_COLUMNS + links_columns(len(self._rows) - 1)

    def _has_link_table(self) -> bool:
        """Whether to show links in a separate table."""
        fits = self._console.height >= _OTHER_LINES + 2 * len(self._rows)
        return not self._is_wide() and fits and any(row.links for row in self._rows.values())

    def _cells(self, row: WorkerRow) -> list[RenderableType]:
        state = row.state(self._now_s())
        started = row.steps_per_s is not None
        return [
            Text(row.name),
            Text(state.value, style=_STYLES[state]),
            Text(f"{row.iteration:,}" if started else UNKNOWN),
            Text(_mean_text([row.loss])),
            Text(accuracy_text(row.accuracy, self._accuracy_name())),
            Text(f"{row.batch:,}" if started else UNKNOWN),
            Text(format_rate(row.samples_per_s)),
            Text(format_bytes(row.bytes_per_s)),
            Text(format_bytes(row.sent_bytes)),
            Text(sparkline(row.spark), style="blue"),
            links_cell(row),
        ]

    def _event_line(self, shown: _ShownEvent) -> Text:
        event = shown.record
        names = [worker_name(self._job, rank) for rank in shown.ranks[:_MAX_NAMED]]
        more = f" and {len(shown.ranks) - _MAX_NAMED} more" * (len(shown.ranks) > _MAX_NAMED)
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{format_duration(event.time_s):>8}  ", style="dim")
        line.append(f"{', '.join(names)}{more}  ")
        line.append(printable(event.reason), style="bold yellow" if event.warning else "bold")
        line.append(f"  {printable(event.message)}")
        return line


def _mean_text(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.4g}" if known else UNKNOWN
