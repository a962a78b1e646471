"""How long silence on a link is usual, learnt from what has arrived on it.

Called by `client` and `service`, for streams and for pulls. A state machine without I/O: arrivals
and time in. Nobody sets a time-out: a slow link's gaps are long and its allowance grows with them.

A process that dies is not noticed here: its kernel closes its connections at once.
"""

from __future__ import annotations

HEARTBEAT_S = 1.0
"""Where nothing else is said, a heartbeat is, this often."""

SPAN_FLOOR = 8.0
"""Never suspicious before so many heartbeats in a row are missing."""

DEVIATIONS = 8.0
GAIN = 1 / 8
"""Weight of the newest gap; with a deviation beside the mean, as TCP learns its time-out.

Source: Jacobson, Congestion Avoidance and Control (1988), with twice its four deviations: what a
false alarm costs here is a link, not a packet.
"""


class ArrivalDeadline:
    """One stream's arrivals, and how long the next one may take."""

    def __init__(self, now_s: float, expected_gap_s: float = HEARTBEAT_S) -> None:
        self._expected_gap_s = expected_gap_s
        self._last_s = now_s
        self._mean_s = expected_gap_s
        self._deviation_s = expected_gap_s

    def arrived(self, now_s: float) -> None:
        """Something came: learns its gap."""
        gap_s = max(0.0, now_s - self._last_s)
        self._last_s = now_s
        self._deviation_s += GAIN * (abs(gap_s - self._mean_s) - self._deviation_s)
        self._mean_s += GAIN * (gap_s - self._mean_s)

    def excuse(self, pause_s: float) -> None:
        """Takes off a time in which we ourselves stood still, and could not have heard."""
        self._last_s += pause_s

    def silent_s(self, now_s: float) -> float:
        """Seconds since the last arrival."""
        return now_s - self._last_s

    @property
    def allowed_s(self) -> float:
        """Silence up to here is usual."""
        learnt_s = self._mean_s + DEVIATIONS * self._deviation_s
        return max(SPAN_FLOOR * self._expected_gap_s, learnt_s)

    def overdue(self, now_s: float) -> bool:
        """Whether the silence is longer than the arrivals so far explain."""
        return self.silent_s(now_s) > self.allowed_s

    def describe(self, now_s: float) -> str:
        """The silence in words, for a reason."""
        return f"silent for {self.silent_s(now_s):.1f} s, usual is up to {self.allowed_s:.1f} s"
