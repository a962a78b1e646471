"""Test deferred signals.

A deferred signal raises KeyboardInterrupt at the end of the block, or where signals are delivered,
whichever comes first. Its handler runs immediately. A pending error is not replaced. Handlers are
restored, except those that the handler itself changed. Blocks may be nested.

Left out: real runs (tests/local/test_interrupts.py).
"""

from __future__ import annotations

import signal
import threading

import pytest

from dlion_local.runner.deferred_signals import SIGNALS, DeferredSignals

pytestmark = pytest.mark.timeout(60, method="thread")


@pytest.fixture
def heard():
    """Return the received signal numbers in order; after the first one all signals are ignored."""
    numbers = []

    def interrupt(number, _frame):
        numbers.append(number)
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_interrupts_at_the_end(heard, number):
    done = []

    def take_away():
        with DeferredSignals():
            signal.raise_signal(number)
            done.append(list(heard))
            signal.raise_signal(number)
            done.append(list(heard))

    with pytest.raises(KeyboardInterrupt):
        take_away()
    assert done == [[number], [number]]
    assert signal.getsignal(number) is signal.SIG_IGN


def test_a_signal_interrupts_where_signals_are_delivered(heard):
    with DeferredSignals() as signals:
        with pytest.raises(KeyboardInterrupt), signals.deliver():
            signal.raise_signal(signal.SIGINT)
        assert heard == [signal.SIGINT]


def test_a_deferred_signal_is_delivered_later(heard):
    with DeferredSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt), signals.deliver():
            pytest.fail("not reached")


def test_a_pending_error_is_not_replaced(heard):
    def break_down():
        with DeferredSignals():
            signal.raise_signal(signal.SIGINT)
            raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        break_down()
    assert heard == [signal.SIGINT]


def test_handlers_are_restored_without_a_signal(heard):
    before = [signal.getsignal(number) for number in SIGNALS]
    with DeferredSignals() as signals, signals.deliver():
        pass
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_nested_blocks_defer_as_one(heard):
    done = []

    def take_away():
        with DeferredSignals() as outer:
            try:
                with outer.deliver(), DeferredSignals():
                    signal.raise_signal(signal.SIGINT)
                    done.append("inner")
            finally:
                done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        take_away()
    assert done == ["inner", "outer"]


def test_ignored_signals_stay_ignored_and_other_threads_change_nothing(heard):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with DeferredSignals():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    def enter():
        with DeferredSignals() as signals, signals.deliver():
            handlers.append(signal.getsignal(signal.SIGINT))

    handlers = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
