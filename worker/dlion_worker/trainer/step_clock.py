"""Times of one iteration, as the loop takes them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class StepClock:
    """Times of the iteration under way, in seconds of wall, CPU and waiting."""

    began_s: float
    began_cpu_s: float
    exchange_thread_began_s: float
    exchange_began_bytes: int
    update_began_cpu_s: float
    began_thread_s: float
    """The main thread's CPU clock."""
    compute_s: float = 0.0
    own_thread_s: float = 0.0
    """Of the main thread's CPU what it would have spent without any peers, but for the update."""
    waited_s: float = 0.0

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """What is done inside would be done without any peers, too."""
        began_s = time.thread_time()
        try:
            yield
        finally:
            self.own_thread_s += time.thread_time() - began_s
