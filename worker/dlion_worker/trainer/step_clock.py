"""The times of one iteration, which the training loop takes."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dlion_core.heat.duty_cycle import rest_s

REST_SLICE_S = 0.2
"""How often a resting loop looks at the share again, and for requests to stop."""


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
    busy_s: float = 0.0
    """All but the waiting, once the iteration has ended."""

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Count the CPU of the block as work that needs no peers."""
        began_s = time.thread_time()
        try:
            yield
        finally:
            self.own_thread_s += time.thread_time() - began_s

    def rest(self, share: Callable[[], float], *, until: Callable[[], bool]) -> None:
        """Rest after the iteration so long that it was busy for that share of the time.

        The share may change meanwhile; the rest ends when `until` is true.
        """
        while (left_s := self._rest_left_s(share())) > 0 and not until():
            time.sleep(min(left_s, REST_SLICE_S))

    def _rest_left_s(self, share: float) -> float:
        return rest_s(share, busy_s=self.busy_s, wall_s=time.monotonic() - self.began_s)
