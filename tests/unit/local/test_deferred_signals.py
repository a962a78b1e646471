"""Facts: a signal that is held back raises KeyboardInterrupt at the end, or where signals are let
through, whichever comes first; its handler is called at once; an error that is on its way goes on;
handlers are put back, but for those that the handler itself has changed; contexts may stand in
each other.

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
    """Numbers of signals, in the order of arrival; after the first all are ignored."""
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


def test_a_signal_interrupts_where_it_is_let_through(heard):
    with DeferredSignals() as signals:
        with pytest.raises(KeyboardInterrupt), signals.deliver():
            signal.raise_signal(signal.SIGINT)
        assert heard == [signal.SIGINT]


def test_what_was_held_back_is_let_through_later(heard):
    with DeferredSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt), signals.deliver():
            pytest.fail("not reached")


def test_an_error_on_its_way_goes_on(heard):
    def break_down():
        with DeferredSignals():
            signal.raise_signal(signal.SIGINT)
            raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        break_down()
    assert heard == [signal.SIGINT]


def test_without_a_signal_handlers_are_put_back(heard):
    before = [signal.getsignal(number) for number in SIGNALS]
    with DeferredSignals() as signals, signals.deliver():
        pass
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_contexts_in_each_other_hold_as_one(heard):
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
            seen.append(signal.getsignal(signal.SIGINT))

    seen = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
