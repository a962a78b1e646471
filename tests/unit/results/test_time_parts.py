"""Tests of the parts of a worker's time.

They add up to the time from its first step to its last; time between steps belongs to the rest.
Records of older releases, without phases and kinds of bytes, are summarised as before. A worker
that slows down is found, and a first step that traces is not mistaken for it. A smaller batch is
reported beside the speed that it lowers.
"""

from __future__ import annotations

import json

import pytest

from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord, LinkRecord, ProcessRecord, StepRecord
from dlion_api.protocol.records import record_from_json, record_to_json
from dlion_api.reasons import EventReason
from dlion_results.run_folder.stored_values import MAX_FIGURE
from dlion_results.summary.tally import MAIN_PHASES, RunTally, WorkerTally
from dlion_results.summary.time_parts import (
    fractions,
    link_bytes,
    pace_change,
    process_parts,
    time_parts,
)

OLD_STEP = (
    '{"kind":"step","time_s":2.0,"rank":0,"incarnation":1,"iteration":1,"loss":1.0,'
    '"local_batch_size":8,"global_batch_size":8,"learning_rate":0.1,"compute_s":0.5,"wall_s":1.0,'
    '"cpu_s":1.0,"exchange_cpu_s":0.1,"waited_s":0.2,"samples":8}'
)
OLD_LINK = (
    '{"kind":"link","time_s":2.0,"rank":0,"peer":1,"iteration":1,"sent_bytes":100,'
    '"acknowledged_bytes":100,"unacknowledged_bytes":0,"queued_bytes":0,"budget_bytes":null,'
    '"bandwidth_bytes_per_s":null,"dropped_messages":0,"connected":true}'
)


def step(iteration: int, *, compute_s: float = 0.5, batch: int = 8) -> StepRecord:
    """A step of a second, which starts half a second after the last has ended."""
    return StepRecord(
        1.5 * iteration, Rank(0), 1, iteration, 1.0, batch, batch, 0.1, compute_s, 1.0, 1.0, 0.1,
        0.2, batch * iteration,
        select_s=0.05, encode_s=0.04, send_s=0.01, decode_s=0.03, apply_s=0.02,
        link_send_s=0.3, link_receive_s=0.4,
    )  # fmt: skip


def tally_of(*records: StepRecord) -> WorkerTally:
    tally = WorkerTally(Rank(0))
    for record in records:
        tally.add_step(record)
    return tally


def test_the_parts_add_up_to_the_time() -> None:
    tally = tally_of(*(step(number) for number in range(1, 11)))
    parts = time_parts(tally)
    assert parts["wall_s"] == pytest.approx(14.5)
    known = [parts[name] for name in (*MAIN_PHASES, "other_s")]
    total_s = tally.compute_s + tally.waited_s + sum(each or 0.0 for each in known)
    assert total_s == pytest.approx(14.5)
    assert parts["other_s"] == pytest.approx(10 * 0.15 + 9 * 0.5)
    assert parts["link_send_s"] == pytest.approx(3.0)


def test_shares_of_several_workers_refer_to_all_their_time() -> None:
    short, long = tally_of(step(1)), tally_of(*(step(number) for number in range(1, 11)))
    shares = fractions([short, long])
    assert shares["select_fraction"] == pytest.approx(11 * 0.05 / 15.5)
    assert shares["other_fraction"] == pytest.approx((11 * 0.15 + 9 * 0.5) / 15.5)


def test_records_of_older_releases_have_no_phases() -> None:
    record = record_from_json(OLD_STEP)
    assert isinstance(record, StepRecord)
    tally = tally_of(record)
    parts = time_parts(tally)
    assert [parts[name] for name in MAIN_PHASES] == [None] * 5
    assert parts["other_s"] == pytest.approx(0.3)
    shares = fractions([tally])
    assert shares["select_fraction"] is None
    assert shares["other_fraction"] == pytest.approx(0.3)


def test_links_of_older_releases_count_as_gradients() -> None:
    record = record_from_json(OLD_LINK)
    assert isinstance(record, LinkRecord)
    tally = WorkerTally(Rank(0))
    tally.add_link(record, 8)
    assert link_bytes(tally.links.values()) == {
        "gradient_bytes": 100, "weights_bytes": 0, "control_bytes": 0, "header_bytes": 0,
        "state_bytes": 0, "probe_bytes": 0,
    }  # fmt: skip


def process(time_s: float, incarnation: int, **seconds: float) -> ProcessRecord:
    return ProcessRecord(time_s, Rank(0), incarnation, 1, **seconds)


def test_the_phases_of_all_starts_add_up_and_the_last_record_of_each_counts() -> None:
    tally = RunTally([Rank(0)])
    for record in (
        process(5.0, 1, import_s=1.0, model_s=2.0),
        process(9.0, 1, import_s=1.0, model_s=2.0, train_s=3.0, save_s=1.0),
        process(20.0, 2, import_s=2.0, join_s=4.0),  # it was killed during training
    ):
        tally.add(record)
    found = process_parts(tally.workers[Rank(0)], first_step_s=5.0)
    assert found is not None
    nonzero = {name: seconds for name, seconds in found.items() if seconds}
    assert nonzero == {
        "launch_s": 2.0, "import_s": 3.0, "model_s": 2.0, "join_s": 4.0, "train_s": 3.0,
        "save_s": 1.0, "process_s": 13.0,
    }  # fmt: skip
    assert process_parts(WorkerTally(Rank(0)), None) is None


@pytest.mark.parametrize(
    ("imported_s", "first_step_s", "launch_s"),
    [
        ([602.0], 603.0, 600.0),
        ([602.0], None, 600.0),
        ([2.0, 602.0], 603.0, None),
        ([602.0], 599.0, None),
    ],
    ids=["its only start", "without a step", "killed before", "joined later"],
)
def test_time_before_a_later_process_is_not_launch_time(
    imported_s: list[float], first_step_s: float | None, launch_s: float | None
) -> None:
    """The only process with a record starts at 600 s."""
    tally = RunTally([Rank(0)])
    for time_s in imported_s:
        tally.add(EventRecord(time_s, Rank(0), 0, EventReason.TRAINER_IMPORTED, "imported"))
    tally.add(process(603.0, 7, import_s=2.0, model_s=1.0))
    found = process_parts(tally.workers[Rank(0)], first_step_s)
    assert found is not None
    assert (found["launch_s"], found["process_s"]) == (launch_s, 3.0)


def test_hostile_phases_stay_within_the_possible_length_of_a_run() -> None:
    tally = RunTally([Rank(0)])
    tally.add(process(-1e300, 1, import_s=-5.0, data_s=1e300, model_s=1e308))
    found = process_parts(tally.workers[Rank(0)], None)
    assert found is not None
    assert found["launch_s"] == found["import_s"] == 0.0
    assert found["process_s"] == 2 * MAX_FIGURE


def test_a_step_record_stays_one_short_line() -> None:
    text = record_to_json(step(1))
    assert record_from_json(text) == step(1)
    assert len(text) < 640
    assert json.loads(text)["select_s"] == 0.05


def test_time_without_a_step_is_zero() -> None:
    assert time_parts(WorkerTally(Rank(0)))["wall_s"] == 0.0
    assert fractions([])["other_fraction"] is None


@pytest.mark.parametrize(
    ("paces_s", "change"),
    [
        ([0.5] * 40, 1.0),
        ([9.0] + [0.5] * 40, 1.0),  # it traces in its first step
        ([0.5] * 20 + [1.25] * 20, 0.4),
        ([0.5] * 1000 + [1.0] * 1000, 0.5),
        ([0.5] * 5 + [1.0] * 5, None),
    ],
    ids=["even", "traced", "slowed", "long", "short"],
)
def test_a_worker_that_slows_down_is_found(paces_s: list[float], change: float | None) -> None:
    tally = tally_of(*(step(k + 1, compute_s=each) for k, each in enumerate(paces_s)))
    assert pace_change(tally) == {
        "pace_change": None if change is None else pytest.approx(change, rel=0.03),
        "batch_change": None if change is None else 1.0,
    }


def test_a_smaller_batch_is_reported_beside_the_speed_that_it_lowers() -> None:
    """The machine does not change: each step costs 30 ms, and each sample 0.8 ms."""
    batches = [64] * 60 + [12] * 140
    tally = tally_of(
        *(step(k + 1, compute_s=0.03 + 0.0008 * b, batch=b) for k, b in enumerate(batches))
    )
    assert pace_change(tally) == {
        "pace_change": pytest.approx(0.385, rel=0.03),
        "batch_change": pytest.approx(12 / 64),
    }
