"""Tests of the signal handler.

While signals are deferred, a signal is only recorded. While they are immediate, it interrupts the
work, also within deferred work. Only the first signal is the reason. A user's program that it
interrupts has not failed.

Left out: the state that a worker then saves (tests/local/test_interrupts.py).
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


def send_signal(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_deferred_work_is_not_interrupted(signals: SignalHandler) -> None:
    with signals.deferred():
        send_signal(signal.SIGTERM)
        send_signal(signal.SIGINT)
    assert signals.reason == "SIGTERM received"


def test_immediate_work_is_interrupted(signals: SignalHandler) -> None:
    with signals.deferred():
        with pytest.raises(Interrupted, match="SIGTERM"), signals.immediate():
            send_signal(signal.SIGTERM)
        send_signal(signal.SIGTERM)  # the worker saves here
    with pytest.raises(Interrupted, match="SIGTERM"):
        send_signal(signal.SIGTERM)


def test_a_program_that_a_signal_interrupts_has_not_failed(signals: SignalHandler) -> None:
    program = TrainingProgram(name="mine.py", build=lambda _shape, _classes: None)

    def interrupted() -> None:
        with user_code(program, "build_model()", "Correct it"), suppress(Exception):
            send_signal(signal.SIGTERM)

    with pytest.raises(Interrupted, match="SIGTERM"):
        interrupted()


def test_a_thread_finds_a_signal_when_it_checks(signals: SignalHandler) -> None:
    signals.check()
    with signals.deferred():
        send_signal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM received"):
        signals.check()
