"""Test the revocation of workers at a coordinator.

- The stream of a revoked worker ends. The next version lists it as Finished and revoked.
- It may not join, report or get a certificate, with any incarnation. Only the owner of its token
  learns the reason.
- Peers learn also of a revoked worker that never joined. A worker of another site stays excluded
  whatever that site reports.
- After the revocation is lifted, only a new start may join. A repeated or empty revocation changes
  nothing.
- In no order of events is a revoked worker ready.

Left out: wire messages (tests/local/test_coordination.py), and which workers are revoked
(tests/unit/operator/served_runs/test_revocations.py).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlion_api.names import JobKey, KeeperIdentity, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Member, MemberState
from dlion_api.protocol.refusals import RefusalReason
from dlion_api.protocol.revocation import Revocation
from dlion_operator.coordinator.events import (
    AccessRequested,
    CallRefusedError,
    EndStream,
    JoinRequested,
    Publish,
    ReportReceived,
)
from dlion_operator.coordinator.state import CoordinatorState
from dlion_operator.pki.token_bindings import Bearer

JOB = JobKey("default", "digits", "1")
A, B = SiteName("plant-a"), SiteName("plant-b")
WORKERS = (
    WorkerIdentity(Rank(0), A, "small", 0),
    WorkerIdentity(Rank(1), A, "small", 1),
    WorkerIdentity(Rank(2), B, "large", 0),
)
STOLEN = Revocation("plant-a/small-1", "stolen")
OWN_TOKEN = Bearer()


def coordinator() -> CoordinatorState:
    return CoordinatorState(JOB, WORKERS, "5pec")


def join(
    rank: int, *, stream: int = 1, incarnation: int = 1, bearer: Bearer | None = OWN_TOKEN
) -> JoinRequested:
    return JoinRequested(
        stream, WORKERS[rank], bearer, incarnation, f"a:{rank}", "", "5pec", known_version=0
    )


def report(rank: int, *, incarnation: int = 1) -> ReportReceived:
    return ReportReceived(
        WORKERS[rank], Bearer(), incarnation, sequence=1, records=(), finished=False, now_s=0.0
    )


def revoke(state: CoordinatorState, *revocations: Revocation) -> tuple[object, ...]:
    return state.revoke(revocations, WORKERS)


def refusal_of(call: object) -> RefusalReason:
    with pytest.raises(CallRefusedError) as refused:
        call()  # type: ignore[operator]
    return refused.value.reason


def member(state: CoordinatorState, rank: int) -> Member:
    found = state.membership().member(Rank(rank))
    assert found is not None
    return found


def test_the_stream_ends_and_all_others_are_informed() -> None:
    state = coordinator()
    state.join(join(0, stream=1))
    state.join(join(1, stream=2))
    version = state.membership().version
    assert revoke(state, STOLEN) == (EndStream(2), Publish())
    assert state.membership().version == version + 1
    assert member(state, 1).revoked
    assert member(state, 1).state is MemberState.FINISHED
    assert member(state, 0).state is MemberState.READY
    assert state.end_stream(2) == ()  # not as for a lost worker, which may return


@pytest.mark.parametrize("revocation", [STOLEN, Revocation("plant-a")])
@pytest.mark.parametrize("incarnation", [1, 2, 10**6])
def test_every_call_of_any_incarnation_is_refused(revocation: Revocation, incarnation: int) -> None:
    state = coordinator()
    state.join(join(1))
    revoke(state, revocation)
    joined = join(1, stream=5, incarnation=incarnation)
    assert refusal_of(lambda: state.join(joined)) is RefusalReason.REVOKED
    assert refusal_of(lambda: state.report(report(1, incarnation=incarnation))) is (
        RefusalReason.REVOKED
    )
    access = AccessRequested(WORKERS[1], "trainer", Bearer())
    assert refusal_of(lambda: state.admit(access)) is RefusalReason.REVOKED


def test_the_message_names_the_reason_to_the_owner_of_the_token_only() -> None:
    state = coordinator()
    revoke(state, STOLEN)
    with pytest.raises(CallRefusedError, match="stolen"):
        state.join(join(1))
    assert refusal_of(lambda: state.join(join(1, bearer=None))) is RefusalReason.BAD_TOKEN


def test_the_keeper_of_a_revoked_site_still_writes_its_records() -> None:
    state = coordinator()
    revoke(state, Revocation("plant-a"))
    state.admit(AccessRequested(KeeperIdentity(A), "keeper", Bearer()))


def test_peers_learn_of_a_worker_unknown_to_this_coordinator() -> None:
    """Peers may know the worker from the previous coordinator."""
    state = coordinator()
    revoke(state, STOLEN)
    assert member(state, 1) == Member(WORKERS[1], 0, MemberState.FINISHED, "", revoked=True)
    revoke(state)
    state.join(join(1))
    assert member(state, 1).state is MemberState.READY


def test_a_worker_of_another_site_stays_excluded_whatever_that_site_reports() -> None:
    state = coordinator()
    there = Member(WORKERS[2], 1, MemberState.READY, "b:2")
    state.update_remote_members([there])
    revoke(state, Revocation("plant-b/large-0"))
    for reported in (there, replace(there, incarnation=2), replace(there, exchange_address="x:1")):
        state.update_remote_members([reported])
        assert member(state, 2).revoked
        assert member(state, 2).state is MemberState.FINISHED
    assert state.update_remote_members([replace(there, exchange_address="x:1")]) == ()
    revoke(state)
    latest = replace(there, incarnation=2, exchange_address="x:1")
    state.update_remote_members([latest])
    assert member(state, 2) == latest


def test_only_a_new_start_may_return() -> None:
    state = coordinator()
    state.join(join(1, incarnation=7))
    revoke(state, STOLEN)
    assert revoke(state) == (Publish(),)
    assert not member(state, 1).revoked
    again = join(1, stream=3, incarnation=7)
    assert refusal_of(lambda: state.join(again)) is RefusalReason.FINISHED
    state.expect(WORKERS[:2])
    state.expect(WORKERS)
    assert refusal_of(lambda: state.join(again)) is RefusalReason.FINISHED
    state.join(join(1, stream=4, incarnation=8))
    assert member(state, 1).state is MemberState.READY


def test_a_repeated_or_empty_revocation_changes_nothing() -> None:
    state = coordinator()
    state.join(join(1))
    assert revoke(state) == ()
    revoke(state, STOLEN)
    version = state.membership().version
    assert revoke(state, STOLEN) == ()
    assert revoke(state, STOLEN, Revocation("plant-a/small-9"), Revocation("nowhere")) == ()
    assert state.membership().version == version


steps = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(0, 1), st.integers(1, 4)),
        st.tuples(st.just("report"), st.integers(0, 1), st.integers(1, 4)),
        st.tuples(st.just("revoke"), st.integers(0, 7), st.just(0)),
        st.tuples(st.just("expect"), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("remote"), st.just(2), st.integers(1, 4)),
        st.tuples(st.just("end"), st.integers(0, 40), st.just(0)),
    ),
    max_size=40,
)


@given(steps)
def test_a_revoked_worker_is_never_ready_in_any_order_of_events(
    events: list[tuple[str, int, int]],
) -> None:
    state = coordinator()
    revoked: set[int] = set()
    version = 0
    for stream, (kind, number, incarnation) in enumerate(events):
        with suppress(CallRefusedError):
            match kind:
                case "join":
                    state.join(join(number, stream=stream, incarnation=incarnation))
                case "report":
                    state.report(report(number, incarnation=incarnation))
                case "revoke":
                    revoked = {rank for rank in range(3) if number >> rank & 1}
                    revoke(state, *(Revocation(WORKERS[rank].name) for rank in sorted(revoked)))
                case "expect":
                    state.expect(WORKERS[:number])
                case "remote":
                    there = Member(WORKERS[2], incarnation, MemberState.READY, "b:2")
                    state.update_remote_members([there])
                case "end":
                    state.end_stream(number)
        membership = state.membership()
        assert {m.identity.rank for m in membership.members if m.revoked} == revoked
        assert not revoked & {m.identity.rank for m in membership.ready()}
        assert membership.version >= version
        version = membership.version
