"""Reports peers that hold this worker at the end of a step for long, by name.

A link that carries heartbeats stays up, however long its peer's trainer is silent.
"""

from collections.abc import Collection

from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_core.lifecycle.reporting import Reporter

REPORT_AFTER_S = 60.0
"""Far longer than a step; doubled after each report."""

MAX_WAIT_S = 5.0
"""Maximum of one wait, which is a slice. A longer one was a pause of this process, not of its
peers."""


class AwaitedPeers:
    """How long one step has waited, and when it is reported next."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self.step_begins()

    def step_begins(self) -> None:
        self._waited_s, self._report_at_s = 0.0, REPORT_AFTER_S

    def waited(self, awaited: Collection[Rank], seconds: float, *, iteration: int) -> None:
        """The open step of that iteration has waited so much longer for these peers."""
        self._waited_s += min(seconds, MAX_WAIT_S)
        if not awaited or self._waited_s < self._report_at_s:
            return
        self._report_at_s *= 2
        workers = f"worker{'s' * (len(awaited) > 1)} {', '.join(map(str, sorted(awaited)))}"
        self._reporter.event(
            EventReason.PEERS_AWAITED,
            f"iteration {iteration} waits for {workers}, linked, for {self._waited_s:.0f} s",
            iteration=iteration,
            warning=True,
        )
