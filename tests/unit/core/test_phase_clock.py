"""Tests of the phase clock.

A phase within another interrupts it, so the phases of a step never add up to more than its time.
Codec work within a policy counts as encoding and decoding. Without a clock, and in another thread,
marks change nothing.

Left out: the times of a real worker (tests/local/test_time_parts.py).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dlion_api.names import Rank
from dlion_api.protocol.measurements import PhaseSeconds
from dlion_api.spec import load_job
from dlion_core import codecs
from dlion_core.lifecycle.instruction_executor import InstructionExecutor
from dlion_core.lifecycle.reporting import Reporter
from dlion_core.lifecycle.stopping import JobProgress
from dlion_core.phase_clock import Phase, PhaseClock, counts_as, in_phase, measured_by
from dlion_core.policies.factory import build
from dlion_core.policies.interface import Layout, LocalStepDone, MemberJoined, MessageArrived
from local_run import job_document
from policy_cluster import spec

if TYPE_CHECKING:
    from collections.abc import Callable

LAYOUT = Layout(("w",), (64,))


class Ticks:
    """A clock that each reading advances by one second."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


class Weights:
    """A replica whose update reports at once."""

    learning_rate = 0.1

    def apply_gradient(self, _: Any, *, on_updated: Callable[[], None], **__: Any) -> None:
        on_updated()


def test_a_phase_within_another_interrupts_it() -> None:
    now_s = 0.0
    clock = PhaseClock(lambda: now_s)
    with measured_by(clock):
        now_s = 1.0  # outside of all phases
        with in_phase(Phase.SELECT):
            now_s = 3.0
            with in_phase(Phase.ENCODE):
                now_s = 6.0
            now_s = 7.0
            assert clock.read() == PhaseSeconds(select_s=3.0, encode_s=3.0)
        now_s = 20.0
    assert clock.read() == PhaseSeconds(select_s=3.0, encode_s=3.0)
    clock.restart()
    assert clock.read() == PhaseSeconds()


def test_an_error_ends_its_phase() -> None:
    now_s = 0.0
    clock = PhaseClock(lambda: now_s)

    @counts_as(Phase.DECODE)
    def fail() -> None:
        nonlocal now_s
        now_s = 2.0
        raise ValueError("damaged")

    with measured_by(clock), pytest.raises(ValueError, match="damaged"):
        fail()
    now_s = 5.0
    assert clock.read() == PhaseSeconds(decode_s=2.0)


def test_a_step_of_a_policy_is_split_into_the_phases() -> None:
    """Selection, encoding, sending, decoding and the update each take some readings."""
    job_spec = spec(exchange={"policy": "full", "codec": "float16"})
    machine = build(job_spec, Rank(0), LAYOUT, [Rank(0), Rank(1)])
    clock, sent = Ticks(), []

    class Parts:
        job = load_job(job_document(2))
        rank = Rank(0)
        replica = Weights()
        reporter = Reporter(
            rank=Rank(0), incarnation=1, start_monotonic_s=0.0, send=lambda _: None, clock_s=clock
        )

    parts: Any = Parts()
    parts.machine = machine
    executor = InstructionExecutor(
        parts,
        JobProgress(),
        send=lambda _, message: sent.append(message),
        refuse=lambda *_: None,
    )
    gradient_D = np.ones(LAYOUT.size, np.float32)
    executor.handle(MemberJoined(Rank(1), 0))
    phases = PhaseClock(clock)
    began_s = clock.now_s
    with measured_by(phases):
        executor.handle(LocalStepDone(1, gradient_D, 8, 0.5, 16))
        executor.handle(MessageArrived(Rank(1), sent[-1]))
    spent = phases.read()
    assert min(spent.select_s, spent.encode_s, spent.send_s, spent.decode_s, spent.apply_s) > 0
    assert spent.main_s <= clock.now_s - began_s


def test_without_a_clock_and_in_another_thread_nothing_is_measured() -> None:
    clock, value_D = PhaseClock(Ticks()), np.ones(8, np.float32)
    with measured_by(clock):
        thread = threading.Thread(
            target=codecs.encode_whole, args=(value_D, codecs.ValueCodec.FLOAT32)
        )
        thread.start()
        thread.join()
    codecs.encode_whole(value_D, codecs.ValueCodec.FLOAT32)
    assert clock.read() == PhaseSeconds()
