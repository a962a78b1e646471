"""What the exchange costs a worker in CPU, by the byte, and how much it may send for that.

Owns that cost. Called by the director, iteration by iteration. Pure.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from dlion_api.measurements import StepTiming

ITERATIONS = 8
"""So many of the last are looked at together: their median, as single ones are off by half."""

SHORT_BYTES = 65536
"""A shorter message costs by the message more than by the byte: cutting it saves little."""


@dataclass(frozen=True)
class _Iteration:
    compute_cpu_s: float
    exchange_cpu_s: float
    exchanged_bytes: int

    @property
    def is_long(self) -> bool:
        """Whether enough was exchanged to tell what a byte costs."""
        return self.exchanged_bytes >= SHORT_BYTES


class ExchangeCost:
    """The bytes that a worker may send in one iteration for a given part of its gradient's CPU.

    Sending and receiving share the worker's CPU with its gradient. On a fast link beside a slow
    processor filling the link would make each iteration longer, which would make room for more
    bytes, and so on. A byte costs what the exchange took, divided by all bytes sent and received.
    Half of the part is for what is sent: what comes in is for the senders to limit, so a weak
    worker among strong ones may pay more than the part.

    Source: ours.
    """

    def __init__(self, fraction: float) -> None:
        """`fraction`: CPU seconds of the exchange over those of computing, at most."""
        self._fraction = fraction
        self._seen: deque[_Iteration] = deque(maxlen=ITERATIONS)

    def add(self, step: StepTiming) -> None:
        """Takes one iteration; one of which bytes or CPU are not known says nothing."""
        if step.compute_cpu_s is None or step.exchanged_bytes is None:
            return
        exchange_cpu_s = max(0.0, step.cpu_s - step.compute_cpu_s)
        self._seen.append(_Iteration(step.compute_cpu_s, exchange_cpu_s, step.exchanged_bytes))

    def most_bytes(self) -> float | None:
        """On all links together; None: no limit is known."""
        costs = [one.exchange_cpu_s / one.exchanged_bytes for one in self._seen if one.is_long]
        if not costs or (cost_s := statistics.median(costs)) <= 0.0:
            return None
        compute_s = statistics.median(one.compute_cpu_s for one in self._seen)
        return self._fraction / 2 * compute_s / cost_s
