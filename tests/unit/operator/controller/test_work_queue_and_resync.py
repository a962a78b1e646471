"""Test when the operator looks at jobs, and how it finds changes that the watches missed.

- One look runs per job at a time. A change during a look leads to another look. The wait after
  errors grows. The loop of a deleted job ends.
- The index takes over and counts missed changes of a list. A missing object is removed after two
  lists. Two such rounds make the operator unhealthy.
- An outage or later installation of Kueue hides no other kind.
- Large objects keep only the fields that the operator reads.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dlion_api.errors import DLionError, UnavailableError
from dlion_operator.controller.health import HealthMonitor
from dlion_operator.controller.metrics import OperatorMetrics
from dlion_operator.controller.work_queue import BATCH_DELAY_S, MAX_CONCURRENT, WorkQueue
from dlion_operator.kubernetes.client import (
    Document,
    Kind,
    Listing,
    RequestRefusedError,
    ServerError,
)
from dlion_operator.kubernetes.resync import WATCHED, Resync, watched_kinds
from dlion_operator.kubernetes.store import ClusterStore, ObjectName, job_of
from dlion_operator.model.backoff import FIRST_WAIT_S, MAX_WAIT_S, backoff_s

NAME = ObjectName("default", "digits")


def job(version: int, uid: str = "u", name: str = "digits") -> Document:
    metadata = {
        "namespace": "default",
        "name": name,
        "uid": uid,
        "resourceVersion": str(version),
        "managedFields": [{"manager": "kubectl"}],
    }
    return {"apiVersion": "dlion.dev/v1alpha1", "kind": "DLionJob", "metadata": metadata}


def pod(version: int, name: str = "p-0") -> Document:
    document = job(version, uid=f"uid-{name}", name=name)
    document["metadata"]["labels"] = {"dlion.dev/job-name": "digits"}
    return document


def workload(version: int) -> Document:
    return pod(version, name="digits-116be6")


# ---- loops -----------------------------------------------------------------------------------


def run_loops(
    look: Callable[[ObjectName], Awaitable[float | None]],
    drive: Callable[[WorkQueue], Awaitable[None]],
    *,
    known: Callable[[], bool] = lambda: True,
) -> list[str]:
    results: list[str] = []

    async def run() -> None:
        loops = WorkQueue(look, lambda _name: known(), lambda result, _s: results.append(result))
        try:
            await asyncio.wait_for(drive(loops), 10)
        finally:
            await loops.close()

    asyncio.run(run())
    return results


def test_a_deleted_job_is_looked_at_until_nothing_is_left_to_do() -> None:
    waits = [None, 0.01, 0.01]

    async def look(_name: ObjectName) -> float | None:
        return waits.pop()

    async def drive(loops: WorkQueue) -> None:
        loops.trigger(NAME)
        await asyncio.gather(*loops._tasks.values())
        assert (waits, loops._tasks) == ([], {})

    run_loops(look, drive, known=lambda: False)


def test_a_change_during_a_look_leads_to_another_one_after_it() -> None:
    looks, under_way = [], 0
    done = asyncio.Event()

    async def look(_name: ObjectName) -> float | None:
        nonlocal under_way
        under_way += 1
        assert under_way == 1
        await asyncio.sleep(0.01)
        looks.append(1)
        under_way -= 1
        if len(looks) == 2:
            done.set()
        return None

    async def drive(loops: WorkQueue) -> None:
        loops.trigger(NAME)
        await asyncio.sleep(0.002)
        for _ in range(5):
            loops.trigger(NAME)
        await done.wait()
        await asyncio.sleep(0.03)

    assert run_loops(look, drive) == ["ok", "ok"]


def test_a_change_while_a_look_waits_leads_to_no_second_look() -> None:
    looks: list[str] = []
    turn = asyncio.Event()

    async def look(name: ObjectName) -> float | None:
        looks.append(name.name)
        await turn.wait()
        return None

    async def drive(loops: WorkQueue) -> None:
        for number in range(MAX_CONCURRENT):
            loops.trigger(ObjectName("default", f"busy-{number}"))
        for _ in range(5):
            await asyncio.sleep(0.01)
            loops.trigger(NAME)
        assert "digits" not in looks
        turn.set()
        await asyncio.sleep(2 * BATCH_DELAY_S)

    run_loops(look, drive)
    assert looks.count("digits") == 1


def test_a_look_is_repeated_at_the_time_that_it_returns() -> None:
    times: list[float] = []
    done = asyncio.Event()

    async def look(_name: ObjectName) -> float | None:
        times.append(asyncio.get_running_loop().time())
        if len(times) == 3:
            done.set()
        return 0.02

    async def drive(loops: WorkQueue) -> None:
        loops.trigger(NAME)
        await done.wait()

    run_loops(look, drive)
    assert times[1] - times[0] >= 0.02


@pytest.mark.parametrize(
    ("error", "result"), [(UnavailableError("503"), "error"), (KeyError("x"), "defect")]
)
def test_an_error_is_counted_and_its_look_repeated(error: Exception, result: str) -> None:
    looks: list[int] = []
    done = asyncio.Event()

    async def look(_name: ObjectName) -> float | None:
        looks.append(1)
        if len(looks) == 1:
            raise error
        done.set()
        return None

    async def drive(loops: WorkQueue) -> None:
        loops.trigger(NAME)
        await done.wait()
        await asyncio.sleep(0)

    assert run_loops(look, drive) == [result, "ok"]


def test_the_loop_of_a_deleted_job_ends() -> None:
    async def look(_name: ObjectName) -> float | None:
        return None

    async def drive(loops: WorkQueue) -> None:
        loops.trigger(NAME)
        await asyncio.sleep(0.02)
        assert loops._tasks == {}
        loops.trigger(NAME)  # and starts again for a new job of that name
        await asyncio.sleep(0.02)

    assert run_loops(look, drive, known=lambda: False) == ["ok", "ok"]


def test_waits_double_up_to_a_bound() -> None:
    waits = [max(backoff_s(failures) for _ in range(200)) for failures in range(12)]
    assert min(waits) >= FIRST_WAIT_S / 2
    assert waits[3] > 2 * waits[1]
    assert max(waits) <= MAX_WAIT_S


# ---- the index and its check ---------------------------------------------------------------------


def test_an_older_state_never_replaces_a_newer_one() -> None:
    store = ClusterStore()
    assert store.put(Kind.DLION_JOB, job(7))
    assert not store.put(Kind.DLION_JOB, job(6))
    assert store.put(Kind.DLION_JOB, job(3, uid="recreated"))
    kept = store.get(Kind.DLION_JOB, NAME)
    assert kept is not None
    assert "managedFields" not in kept["metadata"]
    store.remove(Kind.DLION_JOB, job(9, uid="another"))
    assert store.get(Kind.DLION_JOB, NAME) is kept


def test_a_deletion_counts_only_if_the_known_object_is_not_newer() -> None:
    """A watch by label reports an object as deleted when it loses the label."""
    store = ClusterStore()
    store.put(Kind.POD, pod(5))
    store.remove(Kind.POD, pod(7))
    assert not store.put(Kind.POD, pod(6))
    assert not store.put(Kind.POD, pod(7))
    assert store.put(Kind.POD, pod(8))
    assert store.of_job(Kind.POD, NAME)


def test_a_late_deletion_does_not_remove_a_newer_object() -> None:
    store = ClusterStore()
    store.put(Kind.POD, pod(8))
    store.remove(Kind.POD, pod(7))
    assert store.of_job(Kind.POD, NAME)


def test_an_object_whose_label_is_changed_belongs_to_another_job() -> None:
    store, moved = ClusterStore(), pod(6)
    store.put(Kind.POD, pod(5))
    moved["metadata"]["labels"] = {"dlion.dev/job-name": "another"}
    store.put(Kind.POD, moved)
    assert store.of_job(Kind.POD, NAME) == ()
    assert len(store.of_job(Kind.POD, ObjectName("default", "another"))) == 1


def test_objects_are_found_by_their_jobs_label() -> None:
    store = ClusterStore()
    store.put(Kind.POD, pod(1, "p-1"))
    store.put(Kind.POD, pod(1, "p-0"))
    names = [each["metadata"]["name"] for each in store.of_job(Kind.POD, NAME)]
    assert names == ["p-0", "p-1"]
    assert job_of(Kind.POD, pod(1)) == NAME
    store.remove(Kind.POD, pod(2, "p-0"))
    store.remove(Kind.POD, pod(2, "p-1"))
    assert store.of_job(Kind.POD, NAME) == ()


class Lists:
    """A `Cluster` that only lists the given objects."""

    def __init__(self) -> None:
        self.items: dict[Kind, list[Document]] = {kind: [] for kind in WATCHED}
        self.version = 100
        self.failures = 0
        """Number of the next requests that fail."""
        self.unlistable: dict[Kind, DLionError] = {}
        self.refused = asyncio.Event()
        """Set with each request for these."""
        self.without_whole: set[Kind] = set()
        """Kinds of which only metadata can be listed."""
        self.whole: list[Kind] = []
        """Kinds of which whole objects were listed, in order."""

    async def list(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        selector: str = "",
        metadata_only: bool = False,
    ) -> Listing:
        if self.failures:
            self.failures -= 1
            raise ServerError("no answer")
        if kind in self.unlistable:
            self.refused.set()
            raise self.unlistable[kind]
        if not metadata_only and kind in self.without_whole:
            raise ServerError("no answer")
        if not metadata_only:
            self.whole.append(kind)
        items = [dict(item) for item in self.items[kind]]
        if metadata_only:
            items = [{"metadata": item["metadata"]} for item in items]
        return Listing(items, str(self.version))


def checked() -> tuple[Lists, ClusterStore, Resync, list[ObjectName]]:
    lists, store, triggered = Lists(), ClusterStore(), list[ObjectName]()
    cluster: Any = lists
    return lists, store, Resync(cluster, store, (), triggered.append), triggered


def test_changes_that_the_watches_missed_are_taken_over_and_counted() -> None:
    lists, store, resync, triggered = checked()
    lists.items[Kind.DLION_JOB] = [job(5)]
    asyncio.run(resync.run_once(0))
    assert (resync.stale_rounds, triggered) == (1, [NAME])
    asyncio.run(resync.run_once(0))
    assert (resync.stale_rounds, triggered) == (0, [NAME])
    kept = store.get(Kind.DLION_JOB, NAME)
    assert kept is not None
    assert kept["kind"] == "DLionJob"


def test_a_job_with_a_missed_change_is_looked_at_although_a_later_list_fails() -> None:
    lists, store, resync, triggered = checked()
    lists.items[Kind.DLION_JOB], lists.items[Kind.POD] = [job(5)], [pod(5)]
    lists.without_whole = {Kind.POD}
    for _ in range(2):  # the second round finds no other change, and does not forget the first one
        with pytest.raises(ServerError):
            asyncio.run(resync.run_once(0))
        assert (resync.stale_rounds, triggered) == (1, [NAME])
    lists.without_whole = set()
    asyncio.run(resync.run_once(0))
    assert (resync.stale_rounds, triggered) == (2, [NAME, NAME])
    assert store.of_job(Kind.POD, NAME)


def test_whole_objects_are_listed_only_if_the_watches_missed_some() -> None:
    lists, store, resync, _ = checked()
    lists.items[Kind.POD], lists.items[Kind.DLION_JOB] = [pod(5)], [job(5)]
    store.put(Kind.POD, pod(5))
    asyncio.run(resync.run_once(0))
    assert lists.whole == [Kind.DLION_JOB]
    lists.items[Kind.POD] = [pod(7) | {"status": {"phase": "Failed"}}]
    asyncio.run(resync.run_once(0))
    assert lists.whole == [Kind.DLION_JOB, Kind.POD]
    (kept,) = store.of_job(Kind.POD, NAME)
    assert kept["status"] == {"phase": "Failed"}


def test_only_the_fields_of_a_pod_that_the_operator_reads_are_kept() -> None:
    store = ClusterStore()
    spec = {"nodeName": "n-1", "containers": [{"name": "trainer"}], "volumes": []}
    store.put(Kind.POD, pod(5) | {"spec": spec, "status": {"phase": "Running"}})
    (kept,) = store.of_job(Kind.POD, NAME)
    assert (kept["spec"], kept["status"]) == ({"nodeName": "n-1"}, {"phase": "Running"})
    store.put(Kind.SERVICE, pod(5) | {"spec": {"ports": []}})
    (service,) = store.of_job(Kind.SERVICE, NAME)
    assert service["spec"] == {"ports": []}


def test_the_requests_of_a_workload_are_kept() -> None:
    store = ClusterStore()
    container = {"image": "worker:1", "env": [{"name": "A"}], "resources": {"limits": {"cpu": "2"}}}
    template = {
        "metadata": {"labels": {"team": "vision"}},
        "spec": {
            "volumes": [{"name": "data"}],
            "resources": {"requests": {"cpu": "3"}},
            "initContainers": [{**container, "restartPolicy": "Always"}],
            "containers": [container],
        },
    }
    pod_set = {"name": "keeper", "count": 1, "template": template}
    spec = {"active": True, "priority": 7, "queueName": "edge", "podSets": [pod_set]}
    conditions = [{"type": "Admitted", "status": "True"}]
    store.put(Kind.WORKLOAD, workload(5) | {"spec": spec, "status": {"conditions": conditions}})
    (kept,) = store.of_job(Kind.WORKLOAD, NAME)
    resources = {"resources": container["resources"]}
    counted = {
        "resources": {"requests": {"cpu": "3"}},
        "initContainers": [{**resources, "restartPolicy": "Always"}], "containers": [resources]
    }  # fmt: skip
    assert kept["spec"] == {**spec, "podSets": [{**pod_set, "template": {"spec": counted}}]}
    assert kept["status"] == {"conditions": conditions}


@pytest.mark.parametrize("kind", [Kind.CLAIM, Kind.NETWORK_POLICY])
def test_only_the_metadata_of_an_object_created_once_is_kept(kind: Kind) -> None:
    store = ClusterStore()
    store.put(kind, pod(5) | {"spec": {"egress": []}, "status": {"phase": "Bound"}})
    (kept,) = store.of_job(kind, NAME)
    assert not {"spec", "status"} & kept.keys()
    assert kept["metadata"]["labels"] == pod(5)["metadata"]["labels"]


def test_equal_strings_of_objects_are_kept_once() -> None:
    """Events of a watch are decoded one by one, each with its own strings."""
    store, text = ClusterStore(), json.dumps(pod(5) | {"status": {"phase": "Run-ning"}})
    for name in ("p-0", "p-1"):
        document = json.loads(text)
        document["metadata"] |= {"name": name, "uid": name}
        store.put(Kind.POD, document)
    first, second = store.of_job(Kind.POD, NAME)
    assert first["status"]["phase"] is second["status"]["phase"]
    (one,), (other,) = first["status"], second["status"]
    assert one is other
    assert first == json.loads(text) | {"metadata": first["metadata"]}


def test_a_missing_object_is_removed_after_two_lists() -> None:
    _, store, resync, triggered = checked()
    store.put(Kind.POD, pod(5))
    asyncio.run(resync.run_once(0))
    assert store.of_job(Kind.POD, NAME)
    assert triggered == []
    asyncio.run(resync.run_once(0))
    assert store.of_job(Kind.POD, NAME) == ()
    assert triggered == [NAME]


def test_an_object_deleted_during_a_list_does_not_return() -> None:
    lists, store, resync, triggered = checked()
    store.put(Kind.DLION_JOB, job(5))
    lists.items[Kind.DLION_JOB] = [job(5)]
    store.remove(Kind.DLION_JOB, job(6))
    asyncio.run(resync.run_once(0))
    assert (resync.stale_rounds, triggered) == (0, [])
    assert store.get(Kind.DLION_JOB, NAME) is None
    assert store.put(Kind.DLION_JOB, job(7, uid="recreated"))


@pytest.mark.parametrize("known_by", ["an earlier list", "the watches", "an object's version"])
def test_decreasing_versions_make_the_list_authoritative(known_by: str) -> None:
    """After a restore of etcd one job is older, one is missing and one was deleted since."""
    lists, store, triggered, restored = (
        Lists(),
        ClusterStore(),
        list[ObjectName](),
        list[set[str]](),
    )

    def note() -> None:
        restored.append({name.name for name in store.jobs()})
        assert triggered == []

    cluster: Any = lists
    resync = Resync(cluster, store, (), triggered.append, note)
    there = [job(90), job(95, uid="later", name="later")]
    if known_by == "an earlier list":
        lists.items[Kind.DLION_JOB] = there
        asyncio.run(resync.load())
        asyncio.run(resync.run_once(0))
    for document in there:
        store.put(Kind.DLION_JOB, document)
    store.put(Kind.POD, pod(96))
    store.remove(Kind.DLION_JOB, job(97, uid="ended", name="ended"))
    assert (resync.stale_rounds, resync.has_version_decreased) == (0, False)
    lists.version = 200 if known_by == "an object's version" else 60
    lists.items[Kind.DLION_JOB] = [job(50), job(40, uid="ended", name="ended")]
    asyncio.run(resync.run_once(0))
    assert restored == [{"digits", "ended"}]
    assert {name.name for name in triggered} == {"digits", "later", "ended"}
    assert store.of_job(Kind.POD, NAME) == ()
    kept = store.get(Kind.DLION_JOB, NAME)
    assert kept is not None
    assert kept["metadata"]["resourceVersion"] == "50"
    assert store.put(Kind.DLION_JOB, job(201))
    lists.version, lists.items[Kind.DLION_JOB][0] = 202, job(201)
    asyncio.run(resync.run_once(0))
    assert (len(restored), resync.stale_rounds, resync.has_version_decreased) == (1, 0, True)


def test_a_restore_whose_lists_fail_is_not_forgotten() -> None:
    """No known object has a later version than the second list: only the first list shows it."""
    lists, store, _, triggered = checked()
    cluster: Any = lists
    restored: list[int] = []
    resync = Resync(cluster, store, (), triggered.append, lambda: restored.append(1))
    store.put(Kind.DLION_JOB, job(5))
    lists.items[Kind.DLION_JOB] = [job(5)]
    asyncio.run(resync.run_once(0))
    lists.version, lists.without_whole = 50, {Kind.DLION_JOB}
    with pytest.raises(ServerError):
        asyncio.run(resync.run_once(0))
    lists.without_whole = set()
    asyncio.run(resync.run_once(0))
    assert (restored, triggered, resync.has_version_decreased) == ([1], [NAME], True)


def test_a_suspected_restore_is_checked_immediately() -> None:
    """This holds if the API server fails meanwhile, and if the operator's own writes to restored
    objects exceed the earlier versions.
    """
    lists, store, _, triggered = checked()
    cluster: Any = lists
    store.put(Kind.DLION_JOB, job(205))
    store.put(Kind.POD, pod(96))
    lists.items[Kind.DLION_JOB], lists.version = [job(205)], 210

    async def suspected() -> None:
        lists.failures, restored = 2, asyncio.Event()
        resync = Resync(cluster, store, (), triggered.append, restored.set)
        running = asyncio.create_task(resync.run(every_s=3600, settle_s=0.01))
        await asyncio.sleep(0.05)
        assert not resync.has_version_decreased
        resync.suspect_restore()
        async with asyncio.timeout(20):
            await restored.wait()
        running.cancel()

    asyncio.run(suspected())
    assert (lists.failures, triggered) == (0, [NAME])
    assert store.of_job(Kind.POD, NAME) == ()


def test_an_object_that_changes_during_a_list_is_not_a_restore() -> None:
    """The watch has a later version than the list."""
    lists, store, resync, _ = checked()
    store.put(Kind.DLION_JOB, job(120))
    lists.items[Kind.DLION_JOB], lists.version = [job(90)], 110
    resync._listed_at[Kind.DLION_JOB, None] = 110
    assert not resync._has_older(Kind.DLION_JOB, lists.items[Kind.DLION_JOB])
    resync._listed_at[Kind.DLION_JOB, None] = 120
    assert resync._has_older(Kind.DLION_JOB, lists.items[Kind.DLION_JOB])


UNSERVED = RequestRefusedError("404 page not found", 404)
OUTAGE = ServerError("conversion webhook failed")


@pytest.mark.parametrize("error", [UNSERVED, OUTAGE, RequestRefusedError("forbidden", 403)])
def test_workloads_that_cannot_be_listed_hide_no_other_kind(error: DLionError) -> None:
    lists, store, triggered, is_known = Lists(), ClusterStore(), list[ObjectName](), asyncio.Event()
    lists.items[Kind.DLION_JOB] = [job(5)]
    lists.unlistable = {Kind.WORKLOAD: error}
    cluster: Any = lists

    def trigger(name: ObjectName) -> None:
        triggered.append(name)
        is_known.set()

    resync = Resync(cluster, store, (), trigger)

    async def listed() -> None:
        await resync.load()
        assert store.unlisted == {Kind.WORKLOAD: error}
        await resync.run_once(0)
        assert (resync.stale_rounds, triggered) == (0, [])
        missing = asyncio.create_task(resync.list_missing(every_s=0.001))
        await asyncio.sleep(0.02)
        assert (store.unlisted, triggered) == ({Kind.WORKLOAD: error}, [])
        lists.unlistable, lists.items[Kind.WORKLOAD] = {}, [workload(7)]
        async with asyncio.timeout(5):
            await is_known.wait()
        missing.cancel()

    asyncio.run(listed())
    assert (triggered, store.unlisted) == ([NAME], {})
    assert len(store.of_job(Kind.WORKLOAD, NAME)) == 1
    assert resync.has_unwatched_kind is (error is UNSERVED), "kopf finds kinds when it starts"


def test_a_kind_that_was_not_served_stays_unwatched_after_other_errors() -> None:
    """An upgrade of Kueue serves its new version before its webhook runs."""
    lists, store, is_known = Lists(), ClusterStore(), asyncio.Event()
    lists.items[Kind.DLION_JOB], lists.unlistable = [job(5)], {Kind.WORKLOAD: UNSERVED}
    cluster: Any = lists
    resync = Resync(cluster, store, (), lambda _: is_known.set())

    async def upgraded() -> None:
        await resync.load()
        missing = asyncio.create_task(resync.list_missing(every_s=0.001))
        for error in (OUTAGE, RequestRefusedError("forbidden", 403)):
            lists.unlistable = {Kind.WORKLOAD: error}
            lists.refused.clear()
            await lists.refused.wait()
            assert store.unlisted == {Kind.WORKLOAD: error}
        lists.unlistable = {}
        async with asyncio.timeout(5):
            await is_known.wait()
        missing.cancel()

    asyncio.run(upgraded())
    assert resync.has_unwatched_kind


def test_an_outage_of_kueue_hides_no_other_change() -> None:
    lists, store, resync, triggered = checked()
    lists.items[Kind.WORKLOAD] = [workload(7)]
    asyncio.run(resync.load())
    store.put(Kind.WORKLOAD, workload(120))
    lists.unlistable = {Kind.WORKLOAD: OUTAGE}
    lists.items[Kind.DLION_JOB], lists.version = [job(130)], 140
    asyncio.run(resync.run_once(0))
    assert (triggered, resync.has_version_decreased) == ([NAME], False)
    assert store.unlisted == {Kind.WORKLOAD: OUTAGE}, "users are informed"
    assert len(store.of_job(Kind.WORKLOAD, NAME)) == 1, "the known Workloads stay valid"


def test_after_an_outage_of_kueue_workloads_are_listed_and_still_watched() -> None:
    lists, store, is_known = Lists(), ClusterStore(), asyncio.Event()
    lists.items[Kind.DLION_JOB], lists.items[Kind.WORKLOAD] = [job(5)], [workload(7)]
    cluster: Any = lists
    resync = Resync(cluster, store, (), lambda _: is_known.set())

    async def passed() -> None:
        await resync.load()
        lists.unlistable = {Kind.WORKLOAD: OUTAGE}
        await resync.run_once(0)
        lists.unlistable, lists.items[Kind.WORKLOAD] = {}, [workload(9)]
        missing = asyncio.create_task(resync.list_missing(every_s=0.001))
        async with asyncio.timeout(5):
            await is_known.wait()
        missing.cancel()

    asyncio.run(passed())
    (known,) = store.all(Kind.WORKLOAD)
    assert (known["metadata"]["resourceVersion"], store.unlisted) == ("9", {})
    assert not resync.has_unwatched_kind


def test_a_restore_during_an_outage_of_kueue_leaves_workloads_unknown() -> None:
    lists, store, resync, _ = checked()
    lists.items[Kind.WORKLOAD] = [workload(90)]
    asyncio.run(resync.load())
    lists.unlistable = {Kind.WORKLOAD: OUTAGE}
    resync.suspect_restore()
    asyncio.run(resync.run_once(0))
    assert store.unlisted == {Kind.WORKLOAD: OUTAGE}
    assert store.all(Kind.WORKLOAD) == ()


def test_other_kinds_that_cannot_be_listed_end_the_start() -> None:
    lists, _, resync, _ = checked()
    lists.unlistable = {Kind.CLAIM: UNSERVED}
    with pytest.raises(RequestRefusedError):
        asyncio.run(resync.load())


def test_a_site_that_may_not_queue_jobs_lists_no_workloads() -> None:
    lists, store, triggered = Lists(), ClusterStore(), list[ObjectName]()
    cluster: Any = lists
    kinds = watched_kinds(queues_jobs=False)
    asyncio.run(Resync(cluster, store, (), triggered.append, kinds=kinds).load())
    assert lists.whole == [kind for kind in WATCHED if kind is not Kind.WORKLOAD]
    assert watched_kinds(queues_jobs=True) == WATCHED


def test_watches_that_may_be_silent_are_unhealthy() -> None:
    async def judge(*, gone_back: bool = False, is_unwatched: bool = False) -> str:
        resync: Any = SimpleNamespace(
            stale_rounds=0, has_version_decreased=gone_back, has_unwatched_kind=is_unwatched
        )
        return HealthMonitor(OperatorMetrics(), resync).unhealthy_reason()

    assert asyncio.run(judge()) == ""
    assert "went back" in asyncio.run(judge(gone_back=True))
    assert "Kueue was installed" in asyncio.run(judge(is_unwatched=True))


def test_two_rounds_in_a_row_are_unhealthy() -> None:
    async def judge(rounds: int) -> str:
        resync: Any = SimpleNamespace(
            stale_rounds=rounds, has_version_decreased=False, has_unwatched_kind=False
        )
        return HealthMonitor(OperatorMetrics(), resync).unhealthy_reason()

    assert asyncio.run(judge(1)) == ""
    assert "watches missed changes in 2 rounds" in asyncio.run(judge(2))
