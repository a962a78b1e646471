"""Test rates and states of workers in the live view.

A worker waits once it is silent for longer than its steps explain. Rates are those of the last
seconds. A revoked worker stays revoked, whatever it still reported.

Left out: the view itself (tests/unit/results/test_live_view).
"""

from __future__ import annotations

import pytest

from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord, LinkRecord, StepRecord
from dlion_api.reasons import EventReason
from dlion_cli.views.worker_rows import QUIET_S, WINDOW_S, WorkerDisplayState, WorkerRow


def step(iteration: int, wall_s: float) -> StepRecord:
    """Return a step of 8 samples; steps follow each other without a pause."""
    return StepRecord(
        iteration * wall_s, Rank(0), 1, iteration, 0.5, 8, 32, 0.1, wall_s, wall_s, wall_s, 0.0,
        0.0, 8 * iteration,
    )  # fmt: skip


def stepped(wall_s: float, count: int = 3) -> WorkerRow:
    row = WorkerRow(Rank(0), "small-0")
    for iteration in range(1, count + 1):
        row.add(step(iteration, wall_s))
    return row


@pytest.mark.parametrize(
    ("wall_s", "quiet_s", "state"),
    [
        (0.1, QUIET_S + 0.1, WorkerDisplayState.WAITING),
        (0.1, QUIET_S - 0.1, WorkerDisplayState.TRAINING),
        (4.0, QUIET_S + 0.1, WorkerDisplayState.TRAINING),
        (4.0, 20.1, WorkerDisplayState.WAITING),
    ],
)
def test_silence_beyond_five_steps_is_waiting(
    wall_s: float, quiet_s: float, state: WorkerDisplayState
) -> None:
    assert stepped(wall_s).state(3 * wall_s + quiet_s) is state


def test_a_revoked_worker_stays_revoked() -> None:
    row = stepped(0.1)
    assert not row.is_quarantined
    row.add(EventRecord(0.3, Rank(0), 3, EventReason.WORKER_QUARANTINED, "bad", warning=True))
    row.add(step(4, 0.1))  # it reported this before it learned of the revocation
    assert (row.state(0.5), row.is_quarantined) == (WorkerDisplayState.QUARANTINED, True)


def test_rates_are_those_of_the_last_seconds() -> None:
    row = stepped(0.5, count=100)
    assert row.samples_per_s == pytest.approx(16)
    assert row.steps_per_s == pytest.approx(2)
    row.add(step(101, 1.0))  # at 101 s, long after the others
    assert row.steps_per_s == pytest.approx(2 / (101 - 50 + 0.5))
    assert WINDOW_S < 50


def test_the_rate_of_a_link_counts_from_its_last_report() -> None:
    row = stepped(0.5)
    for at_s, sent_bytes in ((1.0, 500), (3.0, 1000)):
        row.add(LinkRecord(at_s, Rank(0), Rank(1), 1, sent_bytes, 0, 0, 0, None, None, 0, True))
    assert (row.bytes_per_s, row.sent_bytes) == (500, 1500)
