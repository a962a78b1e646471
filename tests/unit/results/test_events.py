"""Tests of reading events.

A torn last line is skipped silently. Other bad lines, also with impossible numbers, are named and
skipped. A pipe is refused. A follower reads each record of a growing file once. It reads all
records again after the file is truncated or replaced.

Left out: the form of a record (tests of `dlion_api.protocol.records`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dlion_api.errors import DataError
from dlion_api.names import Rank
from dlion_api.protocol.progress import (
    END_PHASES,
    START_PHASES,
    EventRecord,
    ProcessRecord,
    StepRecord,
)
from dlion_api.protocol.records import record_to_json
from dlion_results.run_folder.events import MAX_LINE_BYTES, EventFollower, read_events

EVENTS = [EventRecord(float(i), Rank(0), i, "Reason", f"number {i}") for i in range(4)]
LINES = [record_to_json(event).encode() + b"\n" for event in EVENTS]


def read(path: Path, content: bytes) -> tuple[list[EventRecord], list[str]]:
    path.write_bytes(content)
    bad: list[str] = []
    return list(read_events(path, bad.append)), bad


@pytest.mark.parametrize("kept", [1, 10, 40])
def test_a_torn_last_line_is_skipped_silently(tmp_path, kept):
    content = b"".join(LINES[:3]) + LINES[3][:kept]
    assert read(tmp_path / "e", content) == (EVENTS[:3], [])


def test_a_last_line_without_a_newline_counts(tmp_path):
    assert read(tmp_path / "e", b"".join(LINES).rstrip(b"\n")) == (EVENTS, [])


@pytest.mark.parametrize(
    "bad", [b"nonsense\n", b"\xff\xfe\x00\n", b"{}\n", b'{"kind":"event"}\n', b"[1]\n", b"null\n"]
)
def test_a_bad_line_in_the_middle_is_named_and_the_rest_is_read(tmp_path, bad):
    records, named = read(tmp_path / "e", LINES[0] + bad + LINES[1])
    assert records == EVENTS[:2]
    assert [line.partition(": ")[0] for line in named] == ["line 2"]
    assert named[0].partition(": ")[2]


@pytest.mark.parametrize(
    ("field", "value"),
    [("time_s", 1.7e308), ("waited_s", 1e10), ("learning_rate", 1e300), ("time_s", -1e11)],
)
def test_lines_with_impossible_numbers_are_bad(tmp_path, field, value):
    step = StepRecord(1.0, Rank(0), 0, 1, 1e308, 8, 8, 0.1, 1.0, 1.0, 1.0, 1.0, 1.0, 8)
    good, bad = step, replace(step, **{field: value})
    lines = [record_to_json(record).encode() + b"\n" for record in (good, bad, good)]
    records, named = read(tmp_path / "e", b"".join(lines))
    assert records == [good, good]
    assert [line.startswith(f"line 2: {field}: is too large") for line in named] == [True]


@pytest.mark.parametrize("field", [*START_PHASES, "train_s", *END_PHASES])
def test_lines_with_impossible_phases_are_bad(tmp_path, field):
    bad = ProcessRecord(1.0, Rank(0), 1, 1, **{field: 1e10})
    records, named = read(tmp_path / "e", record_to_json(bad).encode() + b"\n")
    assert records == []
    assert [line.startswith(f"line 1: {field}: is too large") for line in named] == [True]


def test_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "e")
    with pytest.raises(DataError, match="is not a regular file"):
        list(read_events(tmp_path / "e"))


def test_an_endless_line_loses_no_other_line(tmp_path):
    flood = b"x" * (3 * MAX_LINE_BYTES) + b"\n"
    records, named = read(tmp_path / "e", LINES[0] + flood + LINES[1])
    assert records == EVENTS[:2]
    assert [line.partition(": ")[0] for line in named] == ["line 2"]


def test_an_empty_file_is_a_run_that_has_not_started(tmp_path):
    assert read(tmp_path / "e", b"") == ([], [])


def test_a_missing_file_is_reported_with_a_remedy(tmp_path):
    with pytest.raises(DataError, match="dlion run"):
        list(read_events(tmp_path / "none"))


class Followed:
    """The records that a follower of that file has passed on."""

    def __init__(self, path: Path) -> None:
        self._follower = EventFollower(path)
        self.records: list[EventRecord] = []
        self.restarts = 0

    def read(self) -> list[EventRecord]:
        self._follower.read_new(self.records.append, self._restart)
        return self.records

    def _restart(self) -> None:
        self.records.clear()
        self.restarts += 1


def test_a_growing_file_is_followed_in_pieces_of_any_size(tmp_path):
    path, content = tmp_path / "e", b"".join([*LINES[:2], b"bad\n", *LINES[2:]])
    followed = Followed(path)
    assert followed.read() == [], "the file does not exist yet"
    for start in range(0, len(content), 7):
        with path.open("ab") as file:
            file.write(content[start : start + 7])
        whole = content[: start + 7].rpartition(b"\n")[0] + b"\n"
        expected = [event for event, line in zip(EVENTS, LINES, strict=True) if line in whole]
        assert followed.read() == expected
    assert (followed.read(), followed.restarts) == (EVENTS, 0)


@pytest.mark.parametrize("way", ["cut", "replaced", "removed"])
def test_a_truncated_or_replaced_file_is_read_again(tmp_path, way):
    path = tmp_path / "e"
    path.write_bytes(b"".join(LINES))
    followed = Followed(path)
    followed.read()
    if way != "cut":
        path.rename(tmp_path / "old")
    if way != "removed":
        path.write_bytes(LINES[0])
    assert followed.read() == ([] if way == "removed" else EVENTS[:1])
    assert followed.restarts == 1


def test_a_follower_skips_a_flood_and_waits_for_its_end(tmp_path):
    path = tmp_path / "e"
    followed = Followed(path)
    path.write_bytes(LINES[0] + b"x" * (2 * MAX_LINE_BYTES + 5))
    assert followed.read() == EVENTS[:1]
    with path.open("ab") as file:
        file.write(b"\n" + LINES[1])
    assert followed.read() == EVENTS[:2]


def test_a_follower_of_a_folder_reports_this(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        Followed(tmp_path).read()
