"""Tests of records and of process configurations.

Every kind of record is restored unchanged, also with non-finite losses and NumPy scalars. An
invalid form is refused with a ContractError only. So is every configuration that a process could
not use.

Left out: random input (tests/property/test_records.py).
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dlion_api.errors import ContractError, SpecError
from dlion_api.names import Rank
from dlion_api.protocol.progress import (
    DirectiveRecord,
    EvaluationRecord,
    EventRecord,
    LinkRecord,
    ProcessRecord,
    ProgressRecord,
    StepRecord,
)
from dlion_api.protocol.records import KINDS, MAX_RECORD_BYTES, record_from_json, record_to_json
from dlion_api.protocol.worker_config import WorkerConfig

if TYPE_CHECKING:
    from pathlib import Path

STEP = StepRecord(1.5, Rank(2), 3, 4, 0.25, 8, 32, 0.1, 0.2, 0.3, 0.4, 0.05, 0.01, 800, "abc", 1.5)
RECORDS: list[ProgressRecord] = [
    STEP,
    LinkRecord(1.0, Rank(0), Rank(1), 2, 3, 4, 5, 6, None, None, 7, connected=False),
    LinkRecord(1.0, Rank(0), Rank(1), 2, 3, 4, 5, 6, 100, 2.5, 7, connected=True),
    EvaluationRecord(1.0, Rank(0), 2, 3, 0.5, 0.7, 100, (0.5, 0.25), (1.0, -2.0), 3.5, final=True),
    EvaluationRecord(
        1.0, Rank(0), 2, 3, 0.5, 0.7, 100, metrics={"mae \N{SNOWMAN}": 12.5, "1": 0.5}
    ),
    DirectiveRecord(1.0, Rank(0), 2, 8, 32, {Rank(1): 5}, {Rank(0): 1.5}, {Rank(1): 9.0}, "why"),
    ProcessRecord(9.0, Rank(0), 1, 2, import_s=1.5, train_s=3.0),
    EventRecord(1.0, Rank(0), 2, "PeerLost", "rank 1 \N{SNOWMAN}", warning=True),
    LinkRecord(
        1.0, Rank(0), Rank(1), 2, 3, 4, 5, 6, 100, 2.5, 7, connected=True, sent_segments=900,
        retransmitted_segments=9, round_trip_s=0.2, min_round_trip_s=0.1,
    ),
]  # fmt: skip


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_is_restored_unchanged(record: ProgressRecord) -> None:
    text = record_to_json(record)
    assert "\n" not in text
    assert record_from_json(text) == record
    assert record_from_json(text.encode()) == record


def test_every_kind_is_tested() -> None:
    assert {type(record) for record in RECORDS} == set(KINDS.values())


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_diverged_loss_is_valid_json_and_restored(loss: float) -> None:
    text = record_to_json(replace(STEP, loss=loss))
    json.loads(text, parse_constant=pytest.fail)
    back = record_from_json(text)
    assert isinstance(back, StepRecord)
    assert str(back.loss) == str(loss)


def test_a_class_without_samples_has_no_accuracy() -> None:
    evaluation = EvaluationRecord(1.0, Rank(0), 2, 3, 0.5, 0.7, 100, (0.5, math.nan))
    back = record_from_json(record_to_json(evaluation))
    assert isinstance(back, EvaluationRecord)
    assert back.class_accuracy[0] == 0.5
    assert math.isnan(back.class_accuracy[1])


def test_a_link_record_during_training_has_no_fields_of_connections() -> None:
    """Each link has one a second, and the connections are read at the end."""
    record = LinkRecord(1.0, Rank(0), Rank(1), 2, 3, 4, 5, 6, None, None, 7, connected=True)
    fields = json.loads(record_to_json(record)).keys()
    assert not fields & {"sent_segments", "retransmitted_segments", "round_trip_s"}
    assert "budget_bytes" in fields


def test_numpy_scalars_are_accepted() -> None:
    record = replace(STEP, loss=np.float32(0.25), iteration=np.int64(4))
    assert record_from_json(record_to_json(record)) == STEP


def test_a_long_message_is_truncated_and_not_refused() -> None:
    back = record_from_json(record_to_json(EventRecord(1.0, Rank(0), 2, "R", "x" * 10**6)))
    assert isinstance(back, EventRecord)
    assert len(back.message) == 4096


@pytest.mark.parametrize(
    "change", [{"compute_s": math.nan}, {"iteration": -1}, {"iteration": 1.5}, {"loss": "0.5"}]
)
def test_an_invalid_record_is_not_sent(change: dict[str, object]) -> None:
    with pytest.raises(ContractError, match=next(iter(change))):
        record_to_json(replace(STEP, **change))  # type: ignore[arg-type]


def changed(**change: object) -> str:
    return json.dumps({**json.loads(record_to_json(STEP)), **change})


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("value", [1, None, "x" * 5000, [0] * 5000, {"iteration": -1}], ids=type)
def test_fields_of_newer_releases_are_left_out(record: ProgressRecord, value: object) -> None:
    document = {**json.loads(record_to_json(record)), "newer": value}
    assert record_from_json(json.dumps(document)) == record


WRONG: dict[str, str | bytes] = {
    "nothing": "",
    "not JSON": "{",
    "wrong UTF-8": b'{"kind": "\xff"}',
    "a list": "[]",
    "deep": "[" * 60_000,
    "many digits": changed(iteration=0).replace('"iteration": 0', '"iteration": ' + "9" * 6000),
    "no kind": "{}",
    "odd kind": changed(kind="odd"),
    "kind of a wrong type": changed(kind=["step"]),
    "missing field": '{"kind": "step"}',
    "doubled field": record_to_json(STEP).replace('"rank":2', '"rank":2,"rank":2'),
    "text for a number": changed(iteration="4"),
    "bool for a number": changed(iteration=True),
    "bool for a float": changed(compute_s=False),
    "fraction for an integer": changed(iteration=4.5),
    "negative": changed(iteration=-1),
    "too large": changed(iteration=2**60),
    "NaN": changed(loss=math.nan),
    "odd text for a loss": changed(loss="nan"),
    "NaN where none can be": changed(compute_s="NaN"),
    "infinite": changed(compute_s=0).replace('"compute_s": 0', '"compute_s": 1e999'),
    "integer beyond floats": changed(compute_s=10**400),
    "null": changed(rank=None),
    "number for text": changed(weights_hash=5),
    "lone surrogate": changed(weights_hash="\ud800"),
    "long text": changed(weights_hash="x" * 5000),
    "too long": changed(weights_hash="x" * MAX_RECORD_BYTES),
    "too long by an unknown field": changed(odd="x" * MAX_RECORD_BYTES),
    "missing beside an unknown field": '{"kind": "step", "odd": 1}',
    "odd rank in a map": record_to_json(RECORDS[5]).replace('"1":5', '"01":5'),
    "text in a map": record_to_json(RECORDS[5]).replace('"1":5', '"1":"5"'),
    "list for a map": record_to_json(RECORDS[5]).replace('{"1":5}', "[5]"),
    "map for a list": record_to_json(RECORDS[3]).replace("[0.5,0.25]", "{}"),
    "text for a metric": record_to_json(RECORDS[4]).replace("12.5", '"good"'),
    "list for metrics": record_to_json(RECORDS[4])
    .replace('{"mae', '[{"mae')
    .replace("0.5}", "0.5}]"),
    "long name of a metric": record_to_json(RECORDS[4]).replace("mae", "m" * 5000),
    "lone surrogate in a name": record_to_json(RECORDS[4]).replace("mae", "\\ud800"),
    "many entries": record_to_json(RECORDS[3]).replace("[0.5,0.25]", str([0] * 5000)),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_form_is_refused(name: str) -> None:
    with pytest.raises(ContractError):
        record_from_json(WRONG[name])


CONFIG = WorkerConfig(
    job_document={"kind": "DLionJob", "spec": {"seed": 1}},
    rank=Rank(2),
    coordinator_address="127.0.0.1:8000",
    authority_pem_path="",
    token_path="token",
    state_dir="state",
    socket_path="s",
    listen_host="::",
    advertise_host="10.0.0.1",
    data_root="",
    results_dir="results",
    program_root="project",
    cpu_quota_cores=0.5,
    link_addresses={"0/exchange": "[::1]:90", "11/measuring": "relay:91"},
    slowest_link={"a → b": 12.5},
    start_time_monotonic_s=-3.5,
    resume=True,
)


def test_a_configuration_is_restored_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "worker.json"
    CONFIG.save(path)
    assert WorkerConfig.load(path) == CONFIG
    assert path.stat().st_mode & 0o007 == 0
    assert list(tmp_path.iterdir()) == [path]
    assert CONFIG.link_address(Rank(0), "exchange") == "[::1]:90"
    assert CONFIG.link_address(Rank(0), "measuring") is None


def test_a_program_is_found_in_the_data_root_by_default() -> None:
    assert str(CONFIG.program_dir) == "project"
    assert str(replace(CONFIG, program_root="", data_root="data").program_dir) == "data"


@pytest.mark.parametrize(
    "change",
    [
        {"slowest_link": {"a → b": 0}},
        {"slowest_link": {"a → b": "fast"}},
        {"slowest_link": ["a → b"]},
        {"rank": -1},
        {"rank": True},
        {"job_document": []},
        {"coordinator_address": "nowhere"},
        {"coordinator_address": "::1:80"},
        {"coordinator_address": "h:0"},
        {"coordinator_address": "h:65536"},
        {"token_path": ""},
        {"program_root": None},
        {"socket_path": "x" * 108},
        {"socket_path": "\udcff" * 108},
        {"socket_path": "\ud800"},
        {"cpu_quota_cores": 0},
        {"cpu_quota_cores": "1"},
        {"cpu_quota_cores": 10**400},
        {"start_time_monotonic_s": math.nan},
        {"link_addresses": {"0": "h:1"}},
        {"link_addresses": {"0/odd": "h:1"}},
        {"link_addresses": {"0/exchange": "h"}},
        {"start_time_monotonic_s": "now"},
        {"resume": 1},
        {"odd": 1},
    ],
)
def test_a_wrong_configuration_names_its_field(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "worker.json"
    path.write_text(json.dumps({**asdict(CONFIG), **change}))
    with pytest.raises(SpecError) as raised:
        WorkerConfig.load(path)
    assert [problem.path for problem in raised.value.problems] == list(change)


def test_all_errors_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "worker.json"
    path.write_text('{"rank": "x", "odd": 1}')
    with pytest.raises(SpecError) as raised:
        WorkerConfig.load(path)
    assert {"rank", "odd", "job_document"} <= {p.path for p in raised.value.problems}


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 100_000, b" " * (5 * 2**20)])
def test_a_file_that_is_not_a_configuration_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "worker.json"
    path.write_bytes(content)
    with pytest.raises(SpecError):
        WorkerConfig.load(path)


def test_a_wrong_configuration_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="socket_path"):
        replace(CONFIG, socket_path="x" * 200).save(tmp_path / "worker.json")
    assert list(tmp_path.iterdir()) == []
