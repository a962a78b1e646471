"""Calls to the coordinator with any bytes, and any timeline of its events.

Any bytes of a call become an event or a ContractError. Events are joins, broken streams and
reports. Versions grow exactly when something is published, a worker's incarnation never decreases,
and only a worker with an open stream is ready.

Left out: examples with their reasons (tests/unit/operator/coordinator).
"""

from __future__ import annotations

from contextlib import suppress

from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from dlion_api.errors import ContractError
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Member, MemberState
from dlion_api.wire import coordination_pb2 as wire
from dlion_operator.coordinator.events import (
    CallRefusedError,
    EndStream,
    Instruction,
    JoinRequested,
    Publish,
    ReportReceived,
)
from dlion_operator.coordinator.messages import (
    access_event,
    checked_size,
    download_event,
    join_event,
    report_event,
)
from dlion_operator.coordinator.state import CoordinatorState
from dlion_operator.pki.token_bindings import Bearer

JOB = JobKey("default", "digits", "1")
WORKERS = tuple(WorkerIdentity(Rank(n), SiteName("plant-a"), "small", n) for n in range(3))


@given(st.binary(max_size=300), st.sampled_from(["sign", "join", "report", "download", "follow"]))
def test_any_bytes_become_an_event_or_are_refused(content: bytes, call: str) -> None:
    try:
        if call == "sign":
            sign = wire.SignRequest.FromString(content)
            checked_size(sign)
            access_event(sign, Bearer("uid"))
        elif call == "join":
            join = wire.JoinRequest.FromString(content)
            checked_size(join)
            join_event(join, stream=1, bearer=Bearer("uid"))
        elif call == "follow":
            follow = wire.FollowRequest.FromString(content)
            checked_size(follow)
            access_event(follow, Bearer("uid"))
        elif call == "download":
            download = wire.DownloadReport.FromString(content)
            checked_size(download)
            download_event(download, Bearer("uid"))
        else:
            report = wire.ProgressReport.FromString(content)
            checked_size(report)
            report_event(report, bearer=Bearer("uid"), now_s=0.0)
    except (ContractError, DecodeError):
        return


def joins(stream: int, rank: int, incarnation: int) -> JoinRequested:
    return JoinRequested(stream, WORKERS[rank], Bearer(), incarnation, "h:1", "", "hash", 0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "break", "leave", "scale"]), st.integers(0, 2), st.integers(1, 4)
    ),
    max_size=40,
)  # fmt: skip


@given(STEPS)
def test_the_membership_is_consistent_over_any_timeline(steps: list[tuple[str, int, int]]) -> None:
    state = CoordinatorState(JOB, WORKERS, "hash")
    streams: dict[int, int] = {}  # open: stream → rank
    newest: dict[int, int] = {}
    expected = {0, 1, 2}
    for number, (what, rank, incarnation) in enumerate(steps):
        before, is_accepted = state.membership().version, True
        instructions: tuple[Instruction, ...] = ()
        try:
            if what == "join":
                instructions = state.join(joins(number, rank, incarnation))
            elif what == "break":
                stream = next((s for s, r in streams.items() if r == rank), -1)
                streams.pop(stream, None)
                instructions = state.end_stream(stream)
            elif what == "scale":
                expected ^= {rank}
                instructions = state.expect([WORKERS[each] for each in sorted(expected)])
            else:
                instructions = state.report(
                    ReportReceived(WORKERS[rank], Bearer(), incarnation, number + 1, (), True, 0.0)
                )
        except CallRefusedError:
            is_accepted = False
        assert (state.membership().version > before) == (Publish() in instructions)
        if what == "join" and is_accepted:
            assert rank in expected
            streams[number] = rank
            assert incarnation >= newest.get(rank, 0)
            newest[rank] = incarnation
        for instruction in instructions:
            if isinstance(instruction, EndStream):
                assert streams.pop(instruction.stream) == rank
        assert state.membership().expected_count == len(expected)
        assert sorted(streams.values()) == sorted(set(streams.values()))
        for member in state.membership().members:
            assert member.incarnation == newest[member.identity.rank]
            if member.state is MemberState.LOST:
                assert member.identity.rank in expected
            if member.state is MemberState.READY:
                assert member.identity.rank in streams.values()


ELSEWHERE = tuple(WorkerIdentity(Rank(n), SiteName("plant-b"), "small", n) for n in range(5))
REPORTS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(0, 2), st.integers(1, 4), st.just("Ready")),
        st.tuples(
            st.just("reported"), st.integers(0, 4), st.integers(1, 4), st.sampled_from(MemberState)
        ),
        st.tuples(st.just("scale"), st.integers(3, 4), st.just(0), st.just("Ready")),
    ),
    max_size=30,
)


@given(REPORTS)
def test_members_of_other_sites_are_added_to_the_own_ones(
    steps: list[tuple[str, int, int, str]],
) -> None:
    """Ranks 0 to 2 are this site's, 3 and 4 another's, which claims the others, too."""
    expected = {*WORKERS, *ELSEWHERE[3:]}
    state = CoordinatorState(JOB, sorted(expected), "hash")
    newest: dict[int, int] = {}
    for number, (what, rank, incarnation, word) in enumerate(steps):
        before = state.membership()
        instructions: tuple[Instruction, ...] = ()
        if what == "join":
            with suppress(CallRefusedError):
                instructions = state.join(joins(number, rank, incarnation))
        elif what == "reported":
            member = Member(ELSEWHERE[rank], incarnation, MemberState(word), "h:1")
            instructions = state.update_remote_members([member])
        else:
            expected ^= {ELSEWHERE[rank]}
            instructions = state.expect(sorted(expected))
        after = state.membership()
        assert (after.version > before.version) == (Publish() in instructions)
        for member in after.members:
            number_of = member.identity.rank
            assert member.identity.site == ("plant-a" if number_of < 3 else "plant-b")
            assert member.incarnation >= newest.get(number_of, 0)
            newest[number_of] = member.incarnation
        if what == "reported" and rank >= 3 and incarnation >= newest.get(rank, 0):
            known = after.member(Rank(rank))
            assert known is not None
            assert known.state == word  # no other report about them exists here
