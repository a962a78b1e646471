"""Tests of the selection of linked peers: neighbours during training, all workers at the end.

They also cover how long the end waits for missing peers.

Left out: the links (tests/local/test_topologies.py). The exchange here only records its calls.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dlion_api.names import Rank
from dlion_api.protocol.measurements import Directive, Grouping
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.spec import load_job
from dlion_core.policies.interface import TopologyChanged
from dlion_core.topology.clusters import graph_of_groups
from dlion_worker.trainer.peer_selection import MIN_PATIENCE_S, PeerSelection
from local_run import job_document

READY, LOST = MemberState.READY, MemberState.LOST


class SelectionScene:
    """Worker 0 of five on a ring (or all linked), the calls of its exchange, and the time."""

    def __init__(self, topology: str = "ring", sites: int | dict[str, int] = 5) -> None:
        exchange = {"policy": "full", "topology": topology}
        self.job = load_job(job_document(sites, exchange=exchange))
        self.states = dict.fromkeys(range(5), READY)
        self.linked: list[Any] = []
        self.quarantined = set[Rank]()
        self.on_regroup: list[TopologyChanged] = []
        self.now_s = 0.0
        config: Any = SimpleNamespace(rank=0, link_address=lambda _rank, _service: None)
        recorder: Any = SimpleNamespace(
            set_members=lambda _members, _dial, *, linked: self.linked.append(linked),
            quarantined=lambda: self.quarantined,
        )
        self.near = PeerSelection(
            self.job,
            config,
            recorder,
            self.membership,
            on_regroup=self.on_regroup.append,
            clock_s=lambda: self.now_s,
        )

    def membership(self) -> Membership:
        members = tuple(
            Member(worker, 1, self.states[worker.rank], "there") for worker in self.job.workers()
        )
        return Membership(1, self.job.key, 5, members)


def ranks(*numbers: int) -> set[Rank]:
    return {Rank(number) for number in numbers}


def test_neighbours_are_linked_and_at_the_end_all_workers() -> None:
    around = SelectionScene()
    around.near.update()
    around.near.connect_all(iteration_s=1.0)
    around.near.update()
    assert around.linked == [ranks(1, 4), None, None]


def test_the_end_waits_a_bounded_time_for_a_worker_that_has_not_joined() -> None:
    around = SelectionScene()
    around.near.connect_all(iteration_s=1.0)
    assert around.near.missing(ranks(1, 4)) == ranks(2, 3)
    around.now_s = MIN_PATIENCE_S - 1
    assert around.near.missing(ranks(1, 4, 2)) == ranks(3)
    around.now_s += MIN_PATIENCE_S  # counted from the last join
    assert around.near.missing(ranks(1, 4)) == ranks(3)  # worker 2 had joined and has left
    around.now_s += 1
    assert around.near.missing(ranks(1, 4)) == set()


def test_the_end_does_not_wait_for_a_lost_worker() -> None:
    around = SelectionScene()
    around.states[3] = LOST
    around.near.connect_all(iteration_s=1.0)
    assert around.near.missing(ranks(1, 4)) == ranks(2)


def test_the_end_does_not_wait_for_a_quarantined_worker() -> None:
    around = SelectionScene()
    around.quarantined = ranks(3)
    around.near.connect_all(iteration_s=1.0)
    assert around.near.missing(ranks(1, 4)) == ranks(2)


def test_the_end_waits_longer_when_iterations_are_slow() -> None:
    around = SelectionScene()
    around.near.connect_all(iteration_s=60.0)
    around.near.missing(ranks(1, 4))
    around.now_s = 239.0
    assert around.near.missing(ranks(1, 4)) == ranks(2, 3)


def test_with_all_workers_linked_the_end_waits_for_a_link_that_just_broke() -> None:
    around = SelectionScene("allToAll")
    around.states[4] = LOST
    around.near.update()
    around.near.connect_all(iteration_s=1.0)
    assert around.linked == [None]
    assert around.near.missing(ranks(1, 2)) == ranks(3)
    assert around.near.missing(ranks(1, 2, 3)) == set()
    assert around.near.missing(ranks(1)) == set(), "these workers have ended and left"


def test_published_models_use_all_present_workers_linked_or_not() -> None:
    around = SelectionScene()
    around.states[2] = LOST
    assert around.near.reachable() == ranks(1, 3, 4)


def test_neighbours_follow_the_newest_grouping_and_the_policy_receives_it() -> None:
    around = SelectionScene("clustered", {"a": 3, "b": 2})
    around.near.update()
    newer = Grouping(2, Rank(1), ((0, 4), (1, 2, 3)), (4, 1))
    for grouping in (
        newer,
        newer,
        Grouping(1, Rank(0), ((0, 1, 2, 3, 4),), (0,)),  # out of date
        Grouping(3, Rank(0), ((0, 1, 2, 3),), (0,)),  # for another number of workers
        None,
    ):
        around.near.on_directive(Directive(1, 8, 40, grouping=grouping))
    assert around.linked == [ranks(1, 2, 3), ranks(4)]
    assert around.near.neighbours() == ranks(4)
    assert [event.graph[Rank(0)] for event in around.on_regroup] == [
        ranks(1, 2, 3),
        ranks(4),
    ]
    assert around.on_regroup[-1].graph == graph_of_groups(newer)
    around.near.connect_all(iteration_s=1.0)
    around.near.on_directive(
        Directive(2, 8, 40, grouping=Grouping(9, Rank(0), ((0, 1, 2, 3, 4),), (0,)))
    )
    assert around.linked[2:] == [None, None]


def test_a_job_with_another_topology_receives_no_grouping() -> None:
    around = SelectionScene()
    around.near.on_directive(
        Directive(1, 8, 40, grouping=Grouping(2, Rank(0), ((0, 1, 2, 3, 4),), (0,)))
    )
    assert around.linked == []
    assert around.near.neighbours() == ranks(1, 4)
