"""Whom a worker links with: neighbours while it trains, everybody at the end, and for how long it
waits for who is missing then.

Left out: the links themselves (tests/local/test_topologies.py); the exchange only notes what it is
told here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dlion_api.membership import Member, Membership, MemberState
from dlion_api.names import Rank
from dlion_api.spec import load_job
from dlion_worker.trainer.neighbourhood import PATIENCE_S, Neighbourhood
from local_run import job_document

READY, LOST = MemberState.READY, MemberState.LOST


class Around:
    """Worker 0 of five on a ring (or all linked), what its exchange is told, and the time."""

    def __init__(self, topology: str = "ring") -> None:
        exchange = {"policy": "full", "topology": topology}
        self.job = load_job(job_document(5, exchange=exchange))
        self.states = dict.fromkeys(range(5), READY)
        self.linked: list[Any] = []
        self.now_s = 0.0
        config: Any = SimpleNamespace(rank=0, link_address=lambda _rank, _service: None)
        told: Any = SimpleNamespace(
            set_members=lambda _members, _dial, *, linked: self.linked.append(linked)
        )
        self.near = Neighbourhood(
            self.job, config, told, self.membership, clock_s=lambda: self.now_s
        )

    def membership(self) -> Membership:
        members = tuple(
            Member(worker, 1, self.states[worker.rank], "there") for worker in self.job.workers()
        )
        return Membership(1, self.job.key, 5, members)


def ranks(*numbers: int) -> set[Rank]:
    return {Rank(number) for number in numbers}


def test_neighbours_are_linked_and_at_the_end_everybody() -> None:
    around = Around()
    around.near.update()
    around.near.widen(iteration_s=1.0)
    around.near.update()
    assert around.linked == [ranks(1, 4), None, None]


def test_who_has_not_come_by_the_end_is_waited_for_but_not_for_ever() -> None:
    around = Around()
    around.near.widen(iteration_s=1.0)
    assert around.near.missing(ranks(1, 4)) == ranks(2, 3)
    around.now_s = PATIENCE_S - 1
    assert around.near.missing(ranks(1, 4, 2)) == ranks(3)
    around.now_s += PATIENCE_S  # counted from when somebody came last
    assert around.near.missing(ranks(1, 4)) == ranks(3)  # 2 was there, and has gone
    around.now_s += 1
    assert around.near.missing(ranks(1, 4)) == set()


def test_who_is_lost_is_not_waited_for() -> None:
    around = Around()
    around.states[3] = LOST
    around.near.widen(iteration_s=1.0)
    assert around.near.missing(ranks(1, 4)) == ranks(2)


def test_slow_iterations_are_waited_for_longer() -> None:
    around = Around()
    around.near.widen(iteration_s=60.0)
    around.near.missing(ranks(1, 4))
    around.now_s = 239.0
    assert around.near.missing(ranks(1, 4)) == ranks(2, 3)


def test_where_all_are_linked_nothing_changes() -> None:
    around = Around("allToAll")
    around.near.update()
    around.near.widen(iteration_s=1.0)
    assert around.linked == [None]
    assert around.near.missing(set()) == set()


def test_models_are_published_from_who_is_there_linked_or_not() -> None:
    around = Around()
    around.states[2] = LOST
    assert set(around.near.link_states()) == ranks(1, 3, 4)
