"""Tests of what a trainer reports to its sidecar of its peers and of itself.

It reports its position, and which workers are linked although the membership calls them lost. It
reports again when such a link comes up or goes down, and not for the links of others.

Left out: what the sidecar makes of it (tests/unit/core/resource_control).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dlion_api.names import Rank
from dlion_api.protocol.measurements import Peers
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_core.lifecycle.inbox import EventInbox
from dlion_core.lifecycle.stopping import JobProgress
from dlion_core.links.events import ExchangeEvent, LinkDown, LinkUp
from dlion_worker.trainer.background.background_tasks import BackgroundTasks
from loop_cluster import synchronous_job


class Trainer:
    """The tasks of worker 0 of three. The test opens its links."""

    def __init__(self, *states: MemberState) -> None:
        """`states` are those of workers 1 and 2."""
        job = synchronous_job(3, 100)
        pairs = zip(job.workers(), (MemberState.READY, *states), strict=True)
        members = tuple(Member(worker, 1, state, "") for worker, state in pairs)
        self.membership = Membership(1, job.key, 3, members)
        self.sent: list[Peers] = []
        self.links: dict[Rank, Any] = {}
        self.inbox = EventInbox(lambda *_: None, clock_s=float)
        parts: Any = SimpleNamespace(
            job=job, inbox=self.inbox, stream=SimpleNamespace(samples=8),
            sidecar=SimpleNamespace(send=self.sent.append),
            exchange=SimpleNamespace(link_counters=lambda: self.links),
        )  # fmt: skip
        others: dict[str, Any] = {
            "data": SimpleNamespace(training_set_samples=24),
            "coordination": SimpleNamespace(membership=lambda: self.membership),
            "credentials": SimpleNamespace(site_bundles_pem={}),
        }
        self.progress = JobProgress()
        self.tasks = BackgroundTasks(
            parts, None, progress=self.progress, peer_selection=None, on_saved=lambda _: None,
            **others,
        )  # type: ignore[arg-type] # fmt: skip

    def change(self, event: ExchangeEvent, rank: int) -> None:
        self.links[Rank(rank)] = SimpleNamespace(connected=isinstance(event, LinkUp))
        self.inbox.put(event)
        self.inbox.drain()


def up(rank: int) -> LinkUp:
    return LinkUp(Rank(rank), epoch=1, iteration=0)


def test_the_position_is_that_of_the_last_step() -> None:
    trainer = Trainer(MemberState.READY, MemberState.READY)
    trainer.tasks.send_peers()
    trainer.progress.advance(95, local_batch_size=8, global_batch_size=500)
    trainer.tasks.send_peers()
    assert [(p.iteration, p.global_batch_size) for p in trainer.sent] == [(0, 0), (95, 500)]


@pytest.mark.parametrize("state", [MemberState.READY, MemberState.FINISHED])
def test_links_of_workers_that_are_not_lost_are_not_reported(state: MemberState) -> None:
    trainer = Trainer(state, MemberState.READY)
    trainer.change(up(1), 1)
    assert trainer.sent == []
    trainer.tasks.send_peers()
    assert [peers.linked_lost for peers in trainer.sent] == [()]


def test_a_lost_worker_is_reported_while_it_is_linked() -> None:
    trainer = Trainer(MemberState.LOST, MemberState.LOST)
    trainer.change(up(2), 2)
    trainer.change(LinkDown(Rank(2), 1, "silent"), 2)
    assert [peers.linked_lost for peers in trainer.sent] == [(2,), ()]
