"""Tests of the meter of the exchange's CPU time: the threads that count, and a sum that never
decreases.

Left out: gRPC's own threads (tests/local/test_links.py).
"""

from __future__ import annotations

import threading
import time

from dlion_worker.transport.cpu import ExchangeCpuMeter


def burn(cpu_s: float) -> None:
    until_s = time.thread_time() + cpu_s
    while time.thread_time() < until_s:
        pass


class Burner:
    """A thread that burns CPU on demand, so that the test controls the time."""

    def __init__(self, name: str) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._cpu_s: float | None = 0.0
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while self._go.acquire() and self._cpu_s is not None:
            burn(self._cpu_s)
            self._done.release()

    def burn(self, cpu_s: float) -> None:
        self._cpu_s = cpu_s
        self._go.release()
        self._done.acquire()

    def end(self) -> None:
        self._cpu_s = None
        self._go.release()
        self.thread.join()


def test_only_the_exchange_and_its_poller_count() -> None:
    own, poller, other = Burner("exchange"), Burner("Thread-1 (_poll_wrapper)"), Burner("else")
    meter = ExchangeCpuMeter(own.thread)
    before_s = meter.seconds()
    own.burn(0.02)
    poller.burn(0.03)
    other.burn(0.05)
    assert 0.05 <= meter.seconds() - before_s < 0.08
    for burner in (own, poller, other):
        burner.end()


def test_a_later_thread_counts_and_an_ended_one_keeps_its_sum() -> None:
    own = Burner("exchange")
    meter = ExchangeCpuMeter(own.thread)
    meter.seconds()
    late = Burner("Thread-2 (_poll_wrapper)")
    late.burn(0.03)
    with_late_s = meter.seconds()
    assert with_late_s >= 0.03
    late.end()
    assert meter.seconds() >= with_late_s
    own.burn(0.01)
    assert meter.seconds() >= with_late_s + 0.01
    own.end()
