"""Facts: a signal is noted while work is done patiently, and breaks off what is done promptly, in
the midst of that too; only the first one is the reason; a user's program that it breaks off has not
failed.

Left out: what a worker saves then (tests/local/test_interrupts.py).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from dlion_worker.trainer.signal_handler import Interrupted, SignalHandler
from dlion_worker.training.programs.program import TrainingProgram, user_code


@pytest.fixture
def signals() -> Iterator[SignalHandler]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield SignalHandler()
    for number, handler in before.items():
        signal.signal(number, handler)


def told(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_what_is_done_patiently_is_not_broken_off(signals: SignalHandler) -> None:
    with signals.deferred():
        told(signal.SIGTERM)
        told(signal.SIGINT)
    assert signals.reason == "SIGTERM received"


def test_what_is_done_promptly_is(signals: SignalHandler) -> None:
    with signals.deferred():
        with pytest.raises(Interrupted, match="SIGTERM"), signals.immediate():
            told(signal.SIGTERM)
        told(signal.SIGTERM)  # it saves now
    with pytest.raises(Interrupted, match="SIGTERM"):
        told(signal.SIGTERM)


def test_a_program_that_a_signal_breaks_off_has_not_failed(signals: SignalHandler) -> None:
    program = TrainingProgram(name="mine.py", build=lambda _shape, _classes: None)

    def breaks_off() -> None:
        with user_code(program, "build_model()", "Correct it"), suppress(Exception):
            told(signal.SIGTERM)

    with pytest.raises(Interrupted, match="SIGTERM"):
        breaks_off()


def test_a_thread_learns_of_a_signal_when_it_looks(signals: SignalHandler) -> None:
    signals.check()
    with signals.deferred():
        told(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM received"):
        signals.check()
