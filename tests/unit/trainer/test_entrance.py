"""Facts: a latecomer to whom another one has named an iteration, when the only peer that trained
vanishes and starts anew with them, waits for that other from the first iteration on.

Left out: real loops, whoever vanishes and comes (`test_loop_cluster.py`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dlion_api.names import Rank
from dlion_worker.exchange import LinkDown, LinkUp
from dlion_worker.policies.interface import MemberJoined, MessageArrived
from dlion_worker.trainer import rendezvous
from dlion_worker.trainer.entrance import Entrance
from dlion_worker.trainer.inbox import Inbox
from loop_cluster import synchronous_job

ONLY, OWN, OTHER = Rank(0), Rank(1), Rank(2)


def test_what_was_agreed_where_somebody_trained_binds_nobody_once_all_begin_anew() -> None:
    inbox = Inbox(lambda peer, message: None)
    out = rendezvous.answer(0, done=0, is_in=False)
    to_come: list[list[Any]] = [
        [LinkUp(ONLY, 1, 7), MessageArrived(ONLY, rendezvous.answer(0, done=7, is_in=True))],
        [LinkUp(OTHER, 1, 0), MessageArrived(OTHER, out)],
        [MessageArrived(OTHER, rendezvous.ask(12))],
        [LinkDown(ONLY, 1, "killed")],
        [LinkUp(ONLY, 2, 0), MessageArrived(ONLY, out)],
    ]

    def arrive() -> None:
        for arrival in to_come.pop(0):
            inbox.put(arrival)

    entrance = Entrance(
        job=synchronous_job(3, 100),
        rank=OWN,
        exchange=SimpleNamespace(send=lambda peer, message: None),  # type: ignore[arg-type]
        inbox=inbox,
        membership=lambda: None,
        stopped=arrive,
        has_barrier=True,
    )
    assert entrance.come_in() is None
    assert not to_come
    assert inbox.start(0) == [MemberJoined(ONLY, 0), MemberJoined(OTHER, 0)]
