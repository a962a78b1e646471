"""Computes when a chunk may pass a pipe, from given times. Used by `emulation.network.relay`."""

from __future__ import annotations

BURST_S = 0.03
"""How much of its rate a pipe may catch up on after a late wake-up of the relay. Over a second it
can exceed its rate by that share, 3 %."""


class Pacer:
    """A pipe with a rate; reservations are served in order."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self.passed_bytes = 0

    def reserve(self, size_bytes: int, now_s: float) -> float:
        """Reserve the pipe for these bytes. Return the time at which they may pass.

        >>> pacer = Pacer(1000.0)
        >>> pacer.reserve(500, now_s=10.0) <= 10.0
        True
        >>> round(pacer.reserve(500, now_s=10.0), 3)
        10.47
        """
        start_s = max(self._free_at_s, now_s - BURST_S)
        self._free_at_s = start_s + size_bytes / self.bytes_per_s
        self.passed_bytes += size_bytes
        return start_s

    def set_rate(self, bytes_per_s: float, now_s: float) -> None:
        """Change the rate; reserved bytes that still wait pass at the new rate."""
        waiting_bytes = max(0.0, self._free_at_s - now_s) * self.bytes_per_s
        self.bytes_per_s = bytes_per_s
        if waiting_bytes > 0:
            self._free_at_s = now_s + waiting_bytes / bytes_per_s
