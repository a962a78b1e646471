"""Facts: a signal is noted while work is done patiently, and breaks off what is done promptly, in
the midst of that too; only the first one is the reason.

Left out: what a worker saves then (tests/local/test_interrupts.py).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from dlion_worker.trainer.interruption import Interrupted, Signals


@pytest.fixture
def signals() -> Iterator[Signals]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield Signals()
    for number, handler in before.items():
        signal.signal(number, handler)


def told(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_what_is_done_patiently_is_not_broken_off(signals: Signals) -> None:
    with signals.patiently():
        told(signal.SIGTERM)
        told(signal.SIGINT)
    assert signals.reason == "SIGTERM received"


def test_what_is_done_promptly_is(signals: Signals) -> None:
    with signals.patiently():
        with pytest.raises(Interrupted, match="SIGTERM"), signals.promptly():
            told(signal.SIGTERM)
        told(signal.SIGTERM)  # it saves now
    with pytest.raises(Interrupted, match="SIGTERM"):
        told(signal.SIGTERM)
