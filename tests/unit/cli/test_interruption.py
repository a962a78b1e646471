"""Facts: the first signal interrupts and later ones do not disturb; after it, and only after it,
work that takes too long is broken off, whatever exceptions it swallows; handlers are put back.

Left out: real runs (tests/local/test_interrupts.py).
"""

from __future__ import annotations

import signal
import time

import pytest

from dlion_cli.interruption import OutOfTimeError, interruptible

pytestmark = pytest.mark.timeout(60, method="thread")  # the other method is by SIGALRM too
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


@pytest.fixture(autouse=True)
def same_handlers_afterwards():
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def work_that_swallows_errors(seconds):
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        try:
            time.sleep(0.01)
        except Exception:  # noqa: BLE001 - what a library may do
            continue


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_interrupts_and_a_second_does_not_disturb(number):
    with interruptible() as interruption:
        assert interruption.at_s is None
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert interruption.at_s is not None
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)


def test_after_a_signal_long_work_is_broken_off():
    with interruptible(within_s=0.2) as interruption:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(OutOfTimeError), interruption.in_time():
            work_that_swallows_errors(20)
        assert time.monotonic() - interruption.at_s < 10


def test_with_no_time_left_work_is_broken_off_at_once():
    with interruptible(within_s=-1.0) as interruption:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(OutOfTimeError), interruption.in_time():
            work_that_swallows_errors(20)


def test_work_that_is_done_in_time_is_let_be():
    with interruptible(within_s=30.0) as interruption:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        with interruption.in_time():
            work_that_swallows_errors(0.02)


def test_without_a_signal_work_takes_its_time():
    with interruptible(within_s=0.0) as interruption, interruption.in_time():
        work_that_swallows_errors(0.05)
