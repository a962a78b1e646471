"""An adaptive timeout for silence on a stream, learned from past arrivals. No I/O.

A slow link's gaps are long, and its timeout grows with them, up to a given bound. A dead process is
not detected here: its kernel closes the connections at once.
"""

import math

HEARTBEAT_S = 1.0
"""Interval of heartbeats on an otherwise idle link."""

MIN_MISSED_HEARTBEATS = 8.0
"""The timeout is never shorter than this many heartbeats."""

RECONNECT_WAIT_S = 0.05
"""Wait before the first attempt to connect again; it grows with every failure."""

MAX_RECONNECT_WAIT_S = 3.0

DEVIATIONS = 8.0
GAIN = 1 / 8
"""Weight of the newest gap in the running mean and deviation.

Source: Jacobson, Congestion Avoidance and Control (1988), with eight deviations instead of four: a
false alarm costs a link here, not a packet.
"""


class ArrivalDeadline:
    """The arrivals on one stream, and the timeout for the next one."""

    def __init__(self, now_s: float, *, max_s: float = math.inf) -> None:
        self._max_s = max_s
        self._last_s = now_s
        self._mean_s = self._deviation_s = HEARTBEAT_S

    def arrived(self, now_s: float) -> None:
        gap_s = max(0.0, now_s - self._last_s)
        self._last_s = now_s
        self._deviation_s += GAIN * (abs(gap_s - self._mean_s) - self._deviation_s)
        self._mean_s += GAIN * (gap_s - self._mean_s)

    def extend(self, pause_s: float) -> None:
        """Exclude a time in which this process itself was suspended."""
        self._last_s += pause_s

    def silent_s(self, now_s: float) -> float:
        return now_s - self._last_s

    @property
    def allowed_s(self) -> float:
        learned_s = self._mean_s + DEVIATIONS * self._deviation_s
        return min(self._max_s, max(MIN_MISSED_HEARTBEATS * HEARTBEAT_S, learned_s))

    def overdue(self, now_s: float) -> bool:
        return self.silent_s(now_s) > self.allowed_s

    def describe(self, now_s: float) -> str:
        return f"silent for {self.silent_s(now_s):.1f} s; timeout: {self.allowed_s:.1f} s"
