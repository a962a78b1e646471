"""Tests of saved state.

Incarnations increase with any clock and disk. A saved membership is restored completely. It is
not restored if it is damaged or of another run. A coordinator that starts again removes no members.
Waits between attempts double up to a bound.

Left out: the times of saving (tests/local/test_coordination.py).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_worker.coordination.backoff import Backoff
from dlion_worker.coordination.saved_state import (
    INCARNATION_FILE,
    MEMBERSHIP_FILE,
    SavedMembership,
    delete_membership,
    load_membership,
    merge_memberships,
    next_incarnation,
    raise_incarnation,
    save_membership,
)

if TYPE_CHECKING:
    from pathlib import Path

JOB = JobKey("default", "digits", "1")


def member(rank: int, state: MemberState = MemberState.READY, incarnation: int = 1) -> Member:
    identity = WorkerIdentity(Rank(rank), SiteName("plant-a"), "small", rank)
    return Member(identity, incarnation, state, f"h:{rank + 1}", "m:9")


def membership(version: int, *members: Member) -> Membership:
    return Membership(version, JOB, 3, members)


def test_each_start_has_a_higher_number_for_any_clock(tmp_path: Path) -> None:
    clock_s = [1000.0, 1000.0, 500.0, 2000.9, 0.0]
    numbers = [next_incarnation(tmp_path, wall_clock_s=now_s) for now_s in clock_s]
    assert numbers == [1000, 1001, 1002, 2000, 2001]


def test_with_a_lost_folder_the_number_follows_the_clock(tmp_path: Path) -> None:
    assert next_incarnation(tmp_path, wall_clock_s=1000.0) == 1000
    (tmp_path / INCARNATION_FILE).unlink()
    assert next_incarnation(tmp_path, wall_clock_s=1001.0) == 1001


@pytest.mark.parametrize("content", [b"", b"x", b"-5", b"\xff\xfe", b"1" * 5000])
def test_with_a_damaged_counter_the_number_follows_the_clock(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / INCARNATION_FILE).write_bytes(content)
    assert next_incarnation(tmp_path, wall_clock_s=1000.0) == 1000


def test_the_next_start_exceeds_the_number_that_the_coordinator_knows(tmp_path: Path) -> None:
    assert next_incarnation(tmp_path, wall_clock_s=1000.0) == 1000
    raise_incarnation(tmp_path, 5000)
    raise_incarnation(tmp_path, 3000)
    assert next_incarnation(tmp_path, wall_clock_s=1001.0) == 5001


def test_a_saved_membership_is_restored(tmp_path: Path) -> None:
    kept = SavedMembership(membership(7, member(0), member(1, MemberState.LOST)), 12.5)
    assert load_membership(tmp_path, JOB) is None
    save_membership(tmp_path, kept)
    assert load_membership(tmp_path, JOB) == kept
    assert load_membership(tmp_path, JobKey("default", "digits", "2")) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [MEMBERSHIP_FILE]
    delete_membership(tmp_path)
    delete_membership(tmp_path)
    assert load_membership(tmp_path, JOB) is None


def test_a_damaged_membership_is_not_restored(tmp_path: Path) -> None:
    save_membership(tmp_path, SavedMembership(membership(7, member(0)), 12.5))
    path = tmp_path / MEMBERSHIP_FILE
    whole = path.read_text()
    endless = whole.replace('"rank": 0', '"rank": 1e999')
    assert endless != whole
    wrong = (whole[:-20], "[]", "null", whole.replace("Ready", "Odd"), "[" * 100_000, endless)
    for content in wrong:
        path.write_text(content)
        assert load_membership(tmp_path, JOB) is None
    path.unlink()
    path.mkdir()  # cannot be read
    assert load_membership(tmp_path, JOB) is None


def test_after_a_reboot_the_start_of_the_run_is_not_known(tmp_path: Path) -> None:
    save_membership(tmp_path, SavedMembership(membership(7, member(0)), 12.5))
    path = tmp_path / MEMBERSHIP_FILE
    path.write_text(path.read_text().replace('"boot": "', '"boot": "other'))
    kept = load_membership(tmp_path, JOB)
    assert kept is not None
    assert math.isnan(kept.start_time_monotonic_s)


def test_a_member_that_a_new_coordinator_does_not_know_yet_stays() -> None:
    kept = membership(7, member(0), member(1), member(2))
    received = membership(8, member(1, MemberState.LOST), member(0, incarnation=4))
    together = merge_memberships(kept, received)
    assert together.version == 8
    assert together.members == (
        member(0, incarnation=4),
        member(1, MemberState.LOST),
        member(2),
    )
    assert merge_memberships(None, received) is received


def test_waits_double_up_to_a_bound_with_jitter() -> None:
    longest, shortest = Backoff(lambda: 1.0), Backoff(lambda: 0.0)
    waits_s = [longest.next_s() for _ in range(7)]
    assert waits_s == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    assert [shortest.next_s() for _ in range(2)] == pytest.approx([0.1, 0.2])
    longest.reset()
    assert longest.next_s() == pytest.approx(0.2)
