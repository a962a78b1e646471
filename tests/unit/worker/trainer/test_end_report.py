"""Tests of the report at the end of a run.

A worker that has saved a model reports its replicas. It also reports missing replicas of workers
that have joined and are still wanted. A failure to write the report does not fail the worker.

Left out: a trainer in a pod (tests/local/test_pods.py); the format (tests/unit/api).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dlion_api.endings import EndReport, is_stop_rule
from dlion_api.names import Rank
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.spec import load_job
from dlion_worker.trainer.end_report import end_report, write_end_report
from local_run import job_document

JOB = load_job(job_document(4))
READY, LOST, FINISHED = MemberState.READY, MemberState.LOST, MemberState.FINISHED
REASON = "worker 1: maxSteps 60 reached"


def membership(*states: MemberState, expected: int = 4) -> Membership:
    """Membership of workers 0, 1, ..., as far as they have joined."""
    workers = JOB.workers()[: len(states)]
    members = tuple(
        Member(worker, 1, state, "") for worker, state in zip(workers, states, strict=True)
    )
    return Membership(1, JOB.key, expected, members)


def missing(
    *states: MemberState, saved_ranks: tuple[int, ...], expected: int = 4
) -> tuple[int, ...]:
    ranks = [Rank(rank) for rank in saved_ranks]
    report = end_report(
        REASON, 60, saved_ranks=ranks, membership=membership(*states, expected=expected)
    )
    assert report.ranks == saved_ranks
    return report.missing


def test_the_reason_is_the_text_of_the_stop_rule() -> None:
    report = end_report(REASON, 60, saved_ranks=(), membership=membership(READY, READY))
    assert report == EndReport("maxSteps 60 reached", 60)
    assert is_stop_rule(report.stop_reason)


@pytest.mark.parametrize(
    ("states", "saved_ranks", "expected", "lacks"),
    [
        ((READY, READY, READY), (0, 1, 2), 4, ()),  # the fourth has never joined
        ((READY, READY, LOST), (0, 1), 4, (2,)),
        ((READY, FINISHED, READY), (0, 2), 4, (1,)),  # it ended earlier
        ((READY, READY, READY, FINISHED), (0, 1, 2), 3, ()),  # it was scaled down
        ((READY, LOST, READY, FINISHED), (0, 2), 3, (1,)),
    ],
)
def test_missing_are_workers_that_have_joined_and_are_still_wanted(
    states: tuple[MemberState, ...],
    saved_ranks: tuple[int, ...],
    expected: int,
    lacks: tuple[int, ...],
) -> None:
    assert missing(*states, saved_ranks=saved_ranks, expected=expected) == lacks


def test_the_file_has_only_the_report_and_without_a_file_nothing_fails(tmp_path: Path) -> None:
    report = EndReport("maxSteps 9 reached", 9, ranks=(Rank(0),))
    path = tmp_path / "termination-log"
    write_end_report(path, report)
    assert not path.exists(), "the kubelet makes the file"
    path.write_text("x" * 5000)
    write_end_report(path, report)
    assert EndReport.from_json(path.read_text()) == report
