"""Test the state of a coordinator with timelines of events.

It admits or refuses workers, with a reason. Versions only increase. A broken stream loses a worker;
a replaced stream does not. A report counts once, under its own name, within a rate. A request to
stop is published once.

Left out: wire messages and gRPC (tests/local/test_coordination.py).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest

from dlion_api.names import JobKey, KeeperIdentity, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import MemberState
from dlion_api.protocol.progress import EventRecord, ProcessRecord, StepRecord
from dlion_api.protocol.refusals import RefusalReason
from dlion_api.protocol.trust import FOLLOWING
from dlion_api.wire import coordination_pb2
from dlion_operator.coordinator.events import (
    AccessRequested,
    CallRefusedError,
    Deliver,
    DownloadReported,
    EndStream,
    Instruction,
    JoinRequested,
    Publish,
    ReportReceived,
)
from dlion_operator.coordinator.messages import download_event
from dlion_operator.coordinator.state import CoordinatorState
from dlion_operator.model.download_progress import DownloadProgress
from dlion_operator.model.rate_limiter import BURST_RECORDS, RECORDS_PER_S
from dlion_operator.pki.token_bindings import Bearer, Proof

JOB = JobKey("default", "digits", "1")
WORKERS = tuple(WorkerIdentity(Rank(n), SiteName("plant-a"), "small", n) for n in range(3))
HASH = "5pec"
SHOWN, NOT_ITS_OWN = Bearer(), None


def coordinator() -> CoordinatorState:
    return CoordinatorState(JOB, WORKERS, HASH)


def join(
    rank: int = 0, *, stream: int, incarnation: int = 1, address: str = "a:1", known: int = 0
) -> JoinRequested:
    return JoinRequested(
        stream=stream,
        worker=WORKERS[rank],
        bearer=SHOWN,
        incarnation=incarnation,
        exchange_address=address,
        measuring_address="",
        spec_hash=HASH,
        known_version=known,
    )


def report(
    rank: int = 0,
    *,
    sequence: int = 1,
    incarnation: int = 1,
    count: int = 1,
    finished: bool = False,
    now_s: float = 0.0,
) -> ReportReceived:
    record = EventRecord(0.0, Rank(rank), 0, "Tested", "")
    records = (record,) * count
    return ReportReceived(WORKERS[rank], SHOWN, incarnation, sequence, records, finished, now_s)


Call = AccessRequested | JoinRequested | ReportReceived


def handle(state: CoordinatorState, call: Call) -> tuple[Instruction, ...]:
    """Return the effects of the call, which may be refused."""
    match call:
        case JoinRequested():
            return state.join(call)
        case ReportReceived():
            return state.report(call)
        case AccessRequested():
            state.admit(call)
            return ()


def refused(state: CoordinatorState, call: Call) -> RefusalReason | None:
    """Return why the call is refused, or None."""
    try:
        handle(state, call)
    except CallRefusedError as refusal:
        return refusal.reason
    return None


def states(state: CoordinatorState) -> list[str]:
    return [member.state.value for member in state.membership().members]


def test_a_worker_of_the_manifest_is_admitted_and_published() -> None:
    state = coordinator()
    assert handle(state, join(1, stream=1, address="h:9")) == (Publish(),)
    membership = state.membership()
    assert (membership.version, membership.expected_count, membership.job) == (1, 3, JOB)
    member = membership.member(Rank(1))
    assert member is not None
    assert (member.state, member.incarnation) == (MemberState.READY, 1)
    assert member.exchange_address == "h:9"


ANOTHER_SITE = WorkerIdentity(Rank(0), SiteName("plant-b"), "small", 0)
RANK_BEYOND = WorkerIdentity(Rank(9), SiteName("plant-a"), "small", 9)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"worker": ANOTHER_SITE}, RefusalReason.UNKNOWN_WORKER),
        ({"worker": RANK_BEYOND}, RefusalReason.UNKNOWN_WORKER),
        ({"bearer": NOT_ITS_OWN}, RefusalReason.BAD_TOKEN),
        ({"spec_hash": "other"}, RefusalReason.SPEC_DIFFERS),
        # An unknown caller learns nothing else.
        ({"bearer": NOT_ITS_OWN, "spec_hash": "other"}, RefusalReason.BAD_TOKEN),
    ],
)
def test_others_are_refused(change: dict[str, object], reason: RefusalReason) -> None:
    state = coordinator()
    assert refused(state, replace(join(stream=1), **change)) is reason
    assert state.membership().members == ()
    assert state.end_stream(1) == ()


def test_only_a_valid_token_gets_a_certificate() -> None:
    state = coordinator()
    assert handle(state, AccessRequested(WORKERS[0], "trainer", SHOWN)) == ()
    stranger = AccessRequested(WORKERS[0], "trainer", NOT_ITS_OWN)
    assert refused(state, stranger) is RefusalReason.BAD_TOKEN


def test_a_token_that_another_worker_used_is_refused() -> None:
    state = coordinator()
    pod = Bearer("uid-1")
    first = replace(join(stream=1), bearer=pod, proof=Proof(b"key", 1))
    assert refused(state, first) is None
    other = Proof(b"another", 9)
    asked = AccessRequested(WORKERS[0], "sidecar", pod, other)
    assert refused(state, asked) is RefusalReason.REPLAYED_TOKEN
    thief = replace(join(stream=2, incarnation=9), bearer=pod, proof=other)
    assert refused(state, thief) is RefusalReason.REPLAYED_TOKEN
    own = replace(asked, proof=Proof(b"key", 1))
    assert handle(state, own) == ()
    assert refused(state, own) is RefusalReason.REPLAYED_TOKEN, "again"


def test_a_keepers_token_that_another_keeper_used_is_refused() -> None:
    state = coordinator()
    keeper, pod = KeeperIdentity(SiteName("plant-a")), Bearer("uid-2")
    followed = AccessRequested(keeper, FOLLOWING, pod, Proof(b"key", 1))
    assert handle(state, followed) == ()
    thief = replace(followed, proof=Proof(b"another", 2))
    assert refused(state, thief) is RefusalReason.REPLAYED_TOKEN


def test_a_new_incarnation_takes_over_and_the_old_one_is_refused() -> None:
    state = coordinator()
    handle(state, join(stream=1, incarnation=5))
    taken = handle(state, join(stream=2, incarnation=7, address="b:2"))
    assert taken == (EndStream(1), Publish())
    # The end of the old stream is not a loss.
    assert state.end_stream(1) == ()
    assert states(state) == ["Ready"]
    with pytest.raises(CallRefusedError) as ghost:
        state.join(join(stream=3, incarnation=5))
    assert ghost.value.reason is RefusalReason.OLD_INCARNATION
    assert ghost.value.known_incarnation == 7
    member = state.membership().member(Rank(0))
    assert member is not None
    assert member.exchange_address == "b:2"
    old_report = report(incarnation=5)
    assert refused(state, old_report) is RefusalReason.OLD_INCARNATION


def test_a_broken_stream_loses_a_worker_and_the_same_incarnation_may_return() -> None:
    state = coordinator()
    handle(state, join(stream=1))
    assert state.end_stream(1) == (Publish(),)
    assert states(state) == ["Lost"]
    assert handle(state, join(stream=2)) == (Publish(),)
    assert states(state) == ["Ready"]
    assert state.membership().version == 3


def test_joining_again_unchanged_publishes_nothing() -> None:
    state = coordinator()
    handle(state, join(stream=1))
    assert handle(state, join(stream=2)) == (EndStream(1),)
    assert state.membership().version == 1


def test_a_worker_that_left_regularly_is_not_lost() -> None:
    state = coordinator()
    handle(state, join(stream=1))
    left = handle(state, report(finished=True))
    assert left[-1] == Publish()
    assert state.end_stream(1) == ()
    assert states(state) == ["Finished"]
    assert refused(state, join(stream=2)) is RefusalReason.FINISHED
    assert refused(state, report(sequence=2)) is RefusalReason.FINISHED
    # It may report its end twice if the answer was lost. A new start may join.
    assert handle(state, report(finished=True)) == ()
    assert handle(state, join(stream=3, incarnation=2)) == (Publish(),)


def test_versions_continue_above_the_version_that_workers_know() -> None:
    """A restarted coordinator has lost its versions; its workers have not."""
    state = coordinator()
    handle(state, join(0, stream=1, known=57))
    assert state.membership().version == 58
    handle(state, join(1, stream=2, known=57))
    assert state.membership().version == 59
    assert handle(state, join(0, stream=3, known=80))[-1] == Publish()
    assert state.membership().version == 81


def test_versions_only_grow() -> None:
    state = coordinator()
    timeline: list[Call | int] = [  # a number means the end of that stream
        join(0, stream=1),
        join(1, stream=2),
        2,
        join(1, stream=3, incarnation=2),
        join(1, stream=4, incarnation=1),
        report(0),
        3,
        report(0, sequence=2, finished=True),
        1,
    ]
    versions = [0]
    for event in timeline:
        published = False
        with suppress(CallRefusedError):
            effects = state.end_stream(event) if isinstance(event, int) else handle(state, event)
            published = Publish() in effects
        versions.append(state.membership().version)
        assert published == (versions[-1] > versions[-2])
    assert states(state) == ["Finished", "Lost"]


def test_a_report_counts_once() -> None:
    state = coordinator()
    handle(state, join(stream=1))
    first = report(sequence=1)
    assert handle(state, first) == (Deliver(first.records),)
    assert handle(state, first) == ()
    second = report(sequence=2)
    assert handle(state, second) == (Deliver(second.records),)
    # A new start counts from the beginning.
    handle(state, join(stream=2, incarnation=2))
    restarted = report(sequence=1, incarnation=2)
    assert handle(state, restarted) == (Deliver(restarted.records),)


def test_a_report_before_joining_is_refused_until_later() -> None:
    state = coordinator()
    assert refused(state, report()) is RefusalReason.NOT_JOINED
    assert RefusalReason.NOT_JOINED.passing


def test_a_report_in_the_name_of_another_worker_is_refused() -> None:
    state = coordinator()
    handle(state, join(0, stream=1))
    foreign = replace(report(0), records=(EventRecord(0.0, Rank(1), 0, "Tested", ""),))
    assert refused(state, foreign) is RefusalReason.MALFORMED
    step = StepRecord(0.0, Rank(0), 9, 1, 0.5, 8, 32, 0.1, 0.1, 0.1, 0.1, 0.0, 0.0, 8)
    assert refused(state, replace(report(0), records=(step,))) is RefusalReason.MALFORMED


def test_a_flood_of_records_is_limited_for_its_sender_only() -> None:
    state = coordinator()
    handle(state, join(0, stream=1))
    handle(state, join(1, stream=2))
    burst = int(BURST_RECORDS)
    assert refused(state, report(sequence=1, count=burst)) is None
    assert refused(state, report(sequence=2)) is RefusalReason.TOO_MUCH
    assert refused(state, report(1, sequence=1)) is None
    # Only time fills the bucket; a second join or a restart does not.
    handle(state, join(0, stream=3, incarnation=2))
    again = report(sequence=1, incarnation=2)
    assert refused(state, again) is RefusalReason.TOO_MUCH
    assert refused(state, replace(again, now_s=1.5 / RECORDS_PER_S)) is None


def test_a_request_to_stop_is_published_once() -> None:
    state = coordinator()
    assert state.stop("Interrupted") == (Publish(),)
    assert state.stop("Again") == ()
    assert state.stop_reason == "Interrupted"


def test_a_keeper_of_a_site_of_the_run_is_admitted() -> None:
    state = coordinator()
    keeper = KeeperIdentity(SiteName("plant-a"))
    assert handle(state, AccessRequested(keeper, "keeper", SHOWN)) == ()
    assert handle(state, AccessRequested(keeper, FOLLOWING, SHOWN)) == ()
    elsewhere = AccessRequested(KeeperIdentity(SiteName("plant-b")), FOLLOWING, SHOWN)
    assert refused(state, elsewhere) is RefusalReason.UNKNOWN_WORKER
    no_token = AccessRequested(keeper, FOLLOWING, NOT_ITS_OWN)
    assert refused(state, no_token) is RefusalReason.BAD_TOKEN


def test_a_removed_worker_ends_regularly_and_may_not_return() -> None:
    state = coordinator()
    handle(state, join(0, stream=1))
    handle(state, join(1, stream=2))
    assert state.expect(WORKERS[:1]) == (Publish(),)
    assert state.expect(WORKERS[:1]) == ()
    assert state.membership().expected_count == 1
    assert states(state) == ["Ready", "Ready"]
    # Its last records count. Once it has left, the run does not wait for it or admit it again.
    assert refused(state, report(1)) is None
    assert state.end_stream(2) == (Publish(),)
    assert states(state) == ["Ready", "Finished"]
    restarted = join(1, stream=3, incarnation=2)
    assert refused(state, restarted) is RefusalReason.UNKNOWN_WORKER
    # It may join after it is added again.
    state.expect(WORKERS[:2])
    assert refused(state, restarted) is None


def test_the_run_does_not_wait_for_a_lost_worker_that_was_removed() -> None:
    state = coordinator()
    handle(state, join(1, stream=2))
    state.end_stream(2)
    assert states(state) == ["Lost"]
    state.expect(WORKERS[:1])
    assert states(state) == ["Finished"]
    # Added again before it learned of the removal, it continues in the same incarnation.
    state.expect(WORKERS)
    assert states(state) == ["Lost"]
    assert refused(state, join(1, stream=3)) is None


def test_only_the_last_download_report_of_the_worker_itself_counts() -> None:
    state = coordinator()
    first, last = (DownloadProgress("dataset-initializer", done, 9) for done in (1, 2))
    for progress in (first, last):
        state.download(DownloadReported(WORKERS[0], SHOWN, progress))
    stranger = WorkerIdentity(Rank(7), SiteName("plant-a"), "small", 7)
    for caller, bearer in ((WORKERS[0], NOT_ITS_OWN), (stranger, SHOWN)):
        with pytest.raises(CallRefusedError):
            state.download(DownloadReported(caller, bearer, first))
    assert state.downloads == {"plant-a/small-0": last}


def test_a_report_of_a_download_names_its_pod() -> None:
    request = coordination_pb2.DownloadReport(container="dataset-initializer", done_bytes=1)
    assert download_event(request, Bearer("of the pod")).progress.pod_uid == "of the pod"
    assert download_event(request, NOT_ITS_OWN).progress.pod_uid == ""


@pytest.mark.parametrize("incarnation", [1, 2])
def test_times_of_another_incarnations_process_are_refused(incarnation: int) -> None:
    state = coordinator()
    handle(state, join(0, stream=1, incarnation=1))
    foreign = replace(report(), records=(ProcessRecord(0.0, Rank(0), incarnation, 0),))
    assert (refused(state, foreign) is RefusalReason.MALFORMED) == (incarnation == 2)
