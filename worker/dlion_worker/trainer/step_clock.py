"""The times of one iteration, which the training loop takes."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class StepClock:
    """Wall, CPU and waiting times of the current iteration, in seconds."""

    began_s: float
    began_cpu_s: float
    exchange_thread_began_s: float
    exchange_began_bytes: int
    update_began_cpu_s: float
    began_thread_s: float
    """The main thread's CPU clock."""
    link_began_s: tuple[float, float]
    """The exchange's seconds of sending and receiving."""
    compute_s: float = 0.0
    own_thread_s: float = 0.0
    """CPU of the main thread that it would have spent without peers, except the update."""
    waited_s: float = 0.0

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Count the CPU of the block as work that needs no peers."""
        began_s = time.thread_time()
        try:
            yield
        finally:
            self.own_thread_s += time.thread_time() - began_s
