"""The time of a run in which no worker trained, as before a resume.

A trainer process counts as training from its first step to its last. A worker that restarts while
others train makes no pause. Records of different workers come in any order.
"""

from typing import Final

from dlion_api.protocol.progress import StepRecord

MAX_PAUSES: Final = 256
"""The newest ones are kept; a run is not resumed that often."""


class TrainingPauses:
    """The pauses of one run, from the steps of all of its workers."""

    def __init__(self) -> None:
        self._pauses: list[tuple[float, float]] = []
        """Begin and end in seconds of the run's clock, in order."""
        self._last_step_s: float | None = None
        """End of the newest step."""

    def add_step(self, record: StepRecord, previous_step_s: float | None) -> None:
        """Add a step. `previous_step_s`: end of the last one of the same process, or None.

        A step without `trained_s` (an older release, a simulation) makes no pause.
        """
        began_s = record.began_s if previous_step_s is None else previous_step_s
        last_s = self._last_step_s
        if self._pauses and began_s < self._pauses[-1][1]:  # else the step is after all of them
            self._shorten(began_s, record.time_s)
        is_counted = previous_step_s is None and record.trained_s is not None
        if is_counted and last_s is not None and began_s > last_s:
            self._pauses = [*self._pauses[1 - MAX_PAUSES :], (last_s, began_s)]
        self._last_step_s = record.time_s if last_s is None else max(last_s, record.time_s)

    def within(self, began_s: float, ended_s: float) -> float:
        """Return the seconds of pauses between these times of the run's clock."""
        return sum(max(0.0, min(end, ended_s) - max(begin, began_s)) for begin, end in self._pauses)

    def _shorten(self, began_s: float, ended_s: float) -> None:
        """Take the time between these out of all pauses."""
        before = [(begin, min(end, began_s)) for begin, end in self._pauses]
        after = [(max(begin, ended_s), end) for begin, end in self._pauses]
        left = sorted(pause for pause in (*before, *after) if pause[0] < pause[1])
        self._pauses = left[-MAX_PAUSES:]
