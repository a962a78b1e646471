"""Test when the workers of a run agree that one of them is faulty.

Most of the others must name it, and at least two of them, within ten minutes. One worker cannot
exclude another; two of three can. A message that names no worker of the run does not count.

Left out: the consequences (tests/unit/operator/served_runs/test_revocations.py,
tests/simulated/test_quarantine.py).
"""

from __future__ import annotations

import pytest

from dlion_api.names import Rank
from dlion_api.protocol.accusations import WINDOW_S, Accusations, quarantine_reason
from dlion_api.protocol.progress import EventRecord
from dlion_api.protocol.revocation import MAX_REASON_CHARACTERS


def warning(by: int, accused: int, reason: str = "UnusualValues") -> EventRecord:
    text = f"worker {accused} contributes values with the norm 100, 30 times that of others"
    return EventRecord(1.0, Rank(by), 5, reason, text, warning=True)


def verdicts(accusations: Accusations, *pairs: tuple[int, int], here: int = 4) -> list[int | None]:
    ranks = [Rank(rank) for rank in range(here)]
    return [accusations.take(warning(*pair), here=ranks, known=[*ranks, Rank(9)]) for pair in pairs]


def test_most_of_the_others_must_name_it() -> None:
    assert verdicts(Accusations(), (0, 3), (0, 3), (1, 3)) == [None, None, 3]
    assert verdicts(Accusations(), (0, 3), (1, 3), (2, 3), here=5) == [None, None, 3]
    assert verdicts(Accusations(), (0, 9), (1, 9), (2, 9), here=4) == [None, None, 9]


def test_one_worker_alone_cannot_exclude_another() -> None:
    """Not alone, not by naming all, not in a run of two, not itself, and not as a stranger."""
    assert verdicts(Accusations(), *[(3, at) for at in (0, 1, 2)] * 5) == [None] * 15
    assert verdicts(Accusations(), (0, 1), here=2) == [None]
    assert verdicts(Accusations(), (1, 1), (0, 1), here=2) == [None, None]
    assert verdicts(Accusations(), (7, 0), (8, 0), (9, 0)) == [None] * 3  # of no site here
    assert verdicts(Accusations(), (0, 5), (1, 5), (2, 5)) == [None] * 3  # no worker of the run


def test_warnings_count_for_ten_minutes() -> None:
    now_s = 0.0
    accusations = Accusations(lambda: now_s)
    assert verdicts(accusations, (0, 2), here=3) == [None]
    now_s = WINDOW_S + 1.0  # two false alarms with a long pause
    assert verdicts(accusations, (1, 2), here=3) == [None]
    now_s += WINDOW_S - 1.0
    assert verdicts(accusations, (0, 2), here=3) == [2]


@pytest.mark.parametrize(
    "message", ["", "worker", "worker x ", "worker -1 ", "worker 99999999999 x", "Worker 1 x"]
)
def test_a_message_that_names_no_worker_does_not_count(message: str) -> None:
    accusations, ranks = Accusations(), [Rank(0), Rank(1), Rank(2)]
    for by in (0, 2):
        record = EventRecord(1.0, Rank(by), 5, "UnusualValues", message, warning=True)
        assert accusations.take(record, here=ranks, known=ranks) is None
    for by in (0, 2):
        assert accusations.take(warning(by, 1, "WorkerLost"), here=ranks, known=ranks) is None


def test_two_faulty_workers_of_three_exclude_the_third() -> None:
    """The documented limit of the rule: they are most of the others."""
    assert verdicts(Accusations(), (0, 2), (1, 2), here=3) == [None, 2]
    assert verdicts(Accusations(), (0, 4), (1, 4), here=5) == [None, None]


def test_the_reason_is_one_line_of_bounded_length() -> None:
    hostile = EventRecord(1.0, Rank(0), 5, "UnusualValues", "worker 1 \x1b[2J\n" + "x" * 9000)
    reason = quarantine_reason(hostile)
    assert reason.isprintable()
    assert len(reason) <= MAX_REASON_CHARACTERS
