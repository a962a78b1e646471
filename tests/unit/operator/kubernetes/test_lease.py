"""Test which of several operators acts in a namespace.

The operators have test clocks and one API server in memory.

- One operator holds a Lease at a time. At rest there is one patch every 5 s.
- Another operator follows a killed one within 20 s, and not before its Lease has expired.
- A process of the same name continues immediately, as does any other after a regular end.
- An outage moves no Lease. A holder that cannot renew stops before another may begin.
- A restore of etcd shows in the Lease. Nothing is written without a Lease.
- The remaining work in a terminating namespace is done.

Left out: processes and a real API server (tests/cluster/test_two_operators.py).
"""

from __future__ import annotations

import asyncio
import copy
import logging
from datetime import UTC, datetime
from itertools import pairwise

import pytest

from dlion_operator.kubernetes.client import Document, Kind, RequestRefusedError, ServerError
from dlion_operator.kubernetes.lease import LEASE_NAME, LeasedCluster, Leases
from operator_in_memory import KeptObjects

NAMESPACE = "ml"
STEP_S = 0.5


class Time:
    """The time that all clocks here show."""

    def __init__(self) -> None:
        self.now_s = 1000.0


class Candidate:
    """An operator reduced to its Leases. Its clock started at another time."""

    def __init__(self, cluster: KeptObjects, time: Time, name: str, began_s: float = 0.0) -> None:
        self.held_from_s: list[float] = []
        self.older = 0
        """How often it found its Lease older than its own last write."""
        self.wanted = {NAMESPACE}
        self.is_up = True
        self._time = time
        self.leases = Leases(
            cluster,
            name,
            wanted=lambda: self.wanted,
            on_held=lambda _: self.held_from_s.append(time.now_s),
            on_older=self._count_older,
            now=lambda: datetime(2026, 1, 31, tzinfo=UTC),
            monotonic_s=lambda: time.now_s - began_s,
        )

    def _count_older(self) -> None:
        self.older += 1

    @property
    def holds(self) -> bool:
        return self.leases.holds(NAMESPACE)


class Cluster:
    """Operators and an API server that may be unreachable."""

    def __init__(self) -> None:
        self.kept, self.time = KeptObjects(), Time()
        self.candidates: list[Candidate] = []
        self.patched_at_s: list[float] = []
        self.is_away = False
        self.kept.refuse = self._judge

    def _judge(self, verb: str, document: Document) -> None:
        if self.is_away:
            raise ServerError("no answer")
        if verb == "patch" and document.get("kind") == "LEASE":
            self.patched_at_s.append(self.time.now_s)

    def join(self, name: str) -> Candidate:
        made = Candidate(self.kept, self.time, name, began_s=500.0 * len(self.candidates))
        self.candidates.append(made)
        return made

    def advance(self, seconds: float) -> None:
        """Advance the time and check that two operators never hold the Lease."""
        for _ in range(int(seconds / STEP_S)):
            for each in self.candidates:
                if each.is_up:
                    asyncio.run(each.leases.run_once())
            assert sum(each.holds for each in self.candidates) <= 1
            self.time.now_s += STEP_S

    @property
    def lease(self) -> Document:
        return self.kept.objects[Kind.LEASE, LEASE_NAME]


def two() -> tuple[Cluster, Candidate, Candidate]:
    """Return a cluster with two operators; the first holds the Lease."""
    cluster = Cluster()
    a, b = cluster.join("a"), cluster.join("b")
    cluster.advance(3)
    assert (a.holds, b.holds) == (True, False)
    return cluster, a, b


def test_one_of_two_holds_the_lease_and_patches_it_every_five_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        cluster, a, b = two()
        cluster.advance(120)
    assert (a.holds, b.holds) == (True, False)
    assert [each.getMessage() for each in caplog.records] == [
        f"namespace ml: Lease {LEASE_NAME} is held by another operator: a"
    ]
    assert min(later - at for at, later in pairwise(cluster.patched_at_s)) >= 5.0
    assert len(a.held_from_s) == 1
    assert cluster.lease["spec"]["holderIdentity"] == "a"


def test_another_operator_follows_a_killed_one_within_20_s_and_after_its_lease() -> None:
    for lives_s in (0.0, 1.5, 3.0, 4.5):
        cluster, a, b = two()
        cluster.advance(20 + lives_s)
        renewed_s, killed_s = cluster.patched_at_s[-1], cluster.time.now_s
        a.is_up = False
        cluster.advance(25)
        assert b.holds
        assert b.held_from_s[0] - renewed_s >= 15.0
        assert b.held_from_s[0] - killed_s <= 20.0
        assert cluster.lease["spec"]["leaseTransitions"] == 1


def test_a_process_of_the_same_name_continues_immediately() -> None:
    cluster, a, b = two()
    a.is_up = False
    cluster.advance(1)
    cluster.candidates.remove(a)
    again = cluster.join("a")
    cluster.advance(STEP_S)
    assert (again.holds, b.holds) == (True, False)


def test_another_operator_continues_immediately_after_a_regular_end() -> None:
    cluster, a, b = two()
    a.is_up = False
    asyncio.run(a.leases.release())
    assert (Kind.LEASE, LEASE_NAME) not in cluster.kept.objects
    cluster.advance(3)
    assert (a.holds, b.holds) == (False, True)


def test_no_lease_stays_without_jobs() -> None:
    cluster, a, _ = two()
    a.wanted = set()
    cluster.candidates = [a]
    cluster.advance(1)
    assert (Kind.LEASE, LEASE_NAME) not in cluster.kept.objects


def test_a_lease_that_could_not_be_deleted_is_deleted_later() -> None:
    cluster, a, _ = two()
    a.wanted, cluster.candidates, cluster.is_away = set(), [a], True
    cluster.advance(30)
    assert not a.holds
    cluster.is_away = False
    cluster.advance(3)
    assert (Kind.LEASE, LEASE_NAME) not in cluster.kept.objects
    assert a.leases.held() == {}


@pytest.mark.parametrize(("verb", "after_s"), [("create", STEP_S), ("patch", 6.0)])
def test_a_lease_is_deleted_after_a_write_with_a_lost_answer(verb: str, after_s: float) -> None:
    cluster = Cluster()
    a = cluster.join("a")
    if verb == "patch":
        cluster.advance(1)
    write = getattr(cluster.kept, verb)

    async def lose_answer(*arguments: object, **options: object) -> None:
        await write(*arguments, **options)
        raise ServerError("no answer")

    setattr(cluster.kept, verb, lose_answer)
    cluster.advance(after_s)
    assert (Kind.LEASE, LEASE_NAME) in cluster.kept.objects
    a.wanted = set()
    cluster.advance(3)
    assert (Kind.LEASE, LEASE_NAME) not in cluster.kept.objects


@pytest.mark.parametrize("away_s", [5.0, 14.0, 30.0, 600.0])
def test_an_outage_moves_no_lease(away_s: float) -> None:
    cluster, a, b = two()
    cluster.advance(10)
    cluster.is_away = True
    cluster.advance(away_s)
    assert a.holds == (away_s < 12)
    cluster.is_away = False
    cluster.advance(60)
    assert (a.holds, b.holds) == (True, False)
    assert "leaseTransitions" not in str(cluster.lease) or (
        cluster.lease["spec"]["leaseTransitions"] == 0
    )


def test_a_short_outage_has_no_effect() -> None:
    cluster, a, _ = two()
    for _ in range(10):
        cluster.is_away = True
        cluster.advance(5)
        cluster.is_away = False
        cluster.advance(5)
        assert a.holds
    assert len(a.held_from_s) == 1


def test_a_lease_of_another_operator_is_not_deleted() -> None:
    cluster, a, _ = two()
    taken = {**cluster.lease, "spec": {**cluster.lease["spec"], "holderIdentity": "c"}}
    cluster.kept._keep(taken)
    asyncio.run(a.leases.release())
    assert cluster.lease["spec"]["holderIdentity"] == "c"
    cluster.candidates = [again := cluster.join("a2")]
    cluster.advance(10)
    assert not again.holds


def test_a_new_label_does_not_change_the_holder() -> None:
    cluster, a, b = two()
    cluster.kept._keep(cluster.lease)  # with another version
    cluster.advance(30)
    assert (a.holds, b.holds, len(a.held_from_s)) == (True, False, 1)


def test_nothing_is_written_without_the_lease() -> None:
    cluster, a, b = two()
    pod: Document = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": NAMESPACE}
    }  # fmt: skip

    async def write_all(candidate: Candidate) -> int:
        leased, refusals = LeasedCluster(cluster.kept, candidate.leases), 0
        for write in (
            lambda: leased.create(pod),
            lambda: leased.apply(pod),
            lambda: leased.patch(Kind.POD, NAMESPACE, "p", {}),
            lambda: leased.delete(Kind.POD, NAMESPACE, "p"),
        ):
            try:
                await write()
            except ServerError:
                refusals += 1
        await leased.create(pod, dry_run=True)
        await leased.get(Kind.POD, NAMESPACE, "p")
        return refusals

    assert asyncio.run(write_all(b)) == 4
    assert (Kind.POD, "p") not in cluster.kept.objects
    assert asyncio.run(write_all(a)) == 0


def test_a_missing_right_is_logged_once_and_gives_no_lease(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = Cluster()

    def refuse(_verb: str, _document: Document) -> None:
        raise RequestRefusedError("leases is forbidden", 403)

    cluster.kept.refuse = refuse
    a = cluster.join("a")
    with caplog.at_level(logging.WARNING):
        cluster.advance(20)
    assert not a.holds
    assert len(caplog.records) == 1
    assert a.leases.held() == {NAMESPACE: False}


def test_the_remaining_work_in_a_terminating_namespace_is_done() -> None:
    cluster = Cluster()

    def refuse(verb: str, _document: Document) -> None:
        if verb == "create":
            raise RequestRefusedError("namespace ml: it is being terminated", 403)

    cluster.kept.refuse = refuse
    a = cluster.join("a")
    cluster.advance(30)
    assert a.holds


def test_the_loop_wakes_for_a_new_namespace() -> None:
    async def drive() -> None:
        cluster, time = KeptObjects(), Time()
        a = Candidate(cluster, time, "a")
        a.wanted = set()
        task = asyncio.create_task(a.leases.run())
        await asyncio.sleep(0)
        a.wanted = {NAMESPACE}
        assert not a.holds  # this wakes the loop
        for _ in range(100):
            await asyncio.sleep(0)
        assert a.holds
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(drive())


def test_a_restore_of_etcd_shows_in_the_lease_at_the_next_renewal() -> None:
    cluster, a, _ = two()
    copied = copy.deepcopy(cluster.lease)
    cluster.advance(20)
    cluster.kept.objects[Kind.LEASE, LEASE_NAME] = copied
    cluster.advance(5.5)
    assert (a.holds, a.older) == (True, 1)
    cluster.advance(20)
    assert (a.holds, a.older) == (True, 1)


def test_a_lease_that_others_changed_is_not_a_restore() -> None:
    cluster, a, _ = two()
    cluster.advance(20)
    asyncio.run(cluster.kept.patch(Kind.LEASE, NAMESPACE, LEASE_NAME, {"metadata": {"labels": {}}}))
    cluster.advance(20)
    assert (a.holds, a.older) == (True, 0)
