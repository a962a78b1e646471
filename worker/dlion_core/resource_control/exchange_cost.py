"""The CPU cost of the exchange per byte, and the bytes that a CPU fraction pays for. Pure."""

import statistics
from collections import deque

from dlion_api.protocol.measurements import StepTiming

ITERATIONS = 8
"""Use the median of this many iterations; single ones are off by half."""

SHORT_BYTES = 65536
"""Below this size the cost is per message rather than per byte."""


class ExchangeCost:
    """The bytes that a worker may send per iteration for a fraction of its computing time.

    Without a limit, filling a fast link would lengthen each iteration of a slow processor, which
    would make room for more bytes. A byte costs the CPU time of the exchange divided by all bytes
    sent and received. Half of the fraction is for sending. Only the senders limit receiving, so a
    slow worker among fast ones may exceed the fraction.

    Source: this project.
    """

    def __init__(self, fraction: float) -> None:
        """`fraction`: maximum CPU seconds of the exchange per CPU second of computing."""
        self._fraction = fraction
        self._iterations: deque[tuple[float, float, int]] = deque(maxlen=ITERATIONS)
        """CPU seconds of computing and of the exchange, and bytes."""

    def add(self, step: StepTiming) -> None:
        """Add one iteration; ignore it if bytes or CPU time are unknown."""
        if step.compute_cpu_s is None or step.exchanged_bytes is None:
            return
        exchange_cpu_s = max(0.0, step.cpu_s - step.compute_cpu_s)
        self._iterations.append((step.compute_cpu_s, exchange_cpu_s, step.exchanged_bytes))

    def max_bytes(self) -> float | None:
        """Maximum bytes on all links together; None: no limit is known."""
        costs = [cpu_s / size for _, cpu_s, size in self._iterations if size >= SHORT_BYTES]
        if not costs or (cost_s := statistics.median(costs)) <= 0.0:
            return None
        compute_s = statistics.median(compute_s for compute_s, _, _ in self._iterations)
        return self._fraction / 2 * compute_s / cost_s
