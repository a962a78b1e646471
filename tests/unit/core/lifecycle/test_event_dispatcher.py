"""Tests of the event dispatcher.

Without a quorum a policy gets no reminder. When the quorum is back, its waiting time starts again.
So a staged decoder waits for sensors that a cut has delayed.

Left out: steps (`test_step_cycle.py`); membership of a quorum (`test_quorum_gate.py`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_core.lifecycle.event_dispatcher import EventDispatcher
from dlion_core.lifecycle.inbox import EventInbox
from dlion_core.lifecycle.instruction_executor import InstructionExecutor
from dlion_core.lifecycle.stopping import JobProgress
from dlion_core.policies.interface import (
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
)
from dlion_core.policies.partitions.quorum import LinkStateAdvertisement, encode_link_states
from quorum_parts import job
from staged_machines import DECODER, staged_machine

NEAR, FAR = Rank(1), Rank(2)
"""Sensors at the decoder's site and at the other site."""


def ignore(*_: object) -> None:
    """No peer listens."""


def reach(version: int, *, is_halted: bool) -> MessageArrived:
    state = LinkStateAdvertisement(FAR, 1, version, is_halted, frozenset({DECODER}))
    return MessageArrived(FAR, Message(MessageKind.REACH, 0, payload=encode_link_states([state])))


def test_a_decoder_waits_for_sensors_after_a_cut_as_long_as_at_the_start() -> None:
    now_s, reported = 0.0, list[EventReason]()
    decoder = staged_machine(DECODER, workers=3, startWithin=300)
    reporter = SimpleNamespace(
        rank=DECODER, incarnation=1, now_s=lambda: now_s,
        event=lambda reason, _text, **_: reported.append(reason),
    )  # fmt: skip
    parts: Any = SimpleNamespace(
        job=job([2, 1], 2), rank=DECODER, machine=decoder, reporter=reporter, replica=None
    )
    executor = InstructionExecutor(parts, JobProgress(), send=ignore, refuse=ignore)
    dispatcher = EventDispatcher(executor, EventInbox(ignore, clock_s=lambda: now_s))

    dispatcher.handle([MemberJoined(NEAR), MemberJoined(FAR)])
    now_s = 200.0
    dispatcher.handle([MemberLeft(FAR)])
    assert dispatcher.quorum_gate.is_closed
    now_s = 400.0
    dispatcher.handle([])
    assert decoder.waiting_for() == {NEAR}
    dispatcher.handle([MemberJoined(FAR), reach(1, is_halted=True), reach(2, is_halted=False)])
    assert not dispatcher.quorum_gate.is_closed
    now_s = 699.0
    dispatcher.handle([])
    assert decoder.waiting_for() == {NEAR, FAR}
    assert EventReason.FEATURES_AWAITED not in reported
    now_s = 700.0
    dispatcher.handle([])
    assert decoder.waiting_for() == frozenset()
    assert reported.count(EventReason.FEATURES_AWAITED) == 1
