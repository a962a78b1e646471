"""Test how failures are read from the logs of workers.

- The whole last traceback of a program is read, with the tracebacks that it follows and without
  other lines. A log without a traceback, an unreadable or a hostile one gives none or a bounded
  one.
- Workers with the same failure share one message.

Left out: whole runs (tests/local/test_bad_input.py).
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_cli.local_runs.local_training import failure_messages
from dlion_local.runner.log_tail import last_traceback, log_tail
from dlion_local.runner.outcome import WorkerFailure, read_failure

RECORD = "2026-01-31 12:00:00,001 ERROR dlion_worker.trainer: "
FIRST = """Traceback (most recent call last):
  File "/mine/program.py", line 7, in build_model
    return layers.NoSuch(3)
AttributeError: no attribute 'NoSuch'"""
SECOND = f"""{FIRST}

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/mine/program.py", line 9, in build_model
    raise ValueError("of mine")
ValueError: of mine
in two lines"""
START = '{"time": "2026-01-31T12:00:00.000+00:00", "supervisor": "started", "pid": 1, "start": 1}'


@pytest.mark.parametrize("traceback", [FIRST, SECOND])
def test_the_whole_traceback_is_read_and_nothing_around_it(tmp_path: Path, traceback: str) -> None:
    log = tmp_path / "worker-0.log"
    log.write_text(
        f"{START}\nearlier output\n{RECORD}traceback of the program\n{traceback}\n"
        f"{RECORD}program program.py: build_model() failed\n{START}\n"
    )
    assert last_traceback(log_tail(log)) == traceback
    failure = read_failure(ExitCode.PROGRAM, log)
    assert (failure.code, failure.traceback) == (ExitCode.PROGRAM, traceback)
    assert "build_model() failed" in failure.message
    assert read_failure(ExitCode.DATA, log).traceback == ""


@pytest.mark.parametrize("code", [128 + signal.SIGKILL, -signal.SIGKILL])
def test_a_signal_to_the_trainer_or_its_supervisor_is_named(tmp_path: Path, code: int) -> None:
    log = tmp_path / "worker-0.log"
    log.write_text(f"{START}\nearlier output\n")
    assert str(read_failure(code, log)) == "FAILED (1): SIGKILL"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("2026-01-31 12:00:00,001 INFO dlion_worker.transport.client: link to b: closed", "ended"),
        ("2026-01-31 12:00:00,001 WARNING dlion_worker.trainer: no space", "exit code 3: no space"),
        ("terminate called", "exit code 3: terminate called"),
        (
            "terminate called\n2026-01-31 12:00:00,001 INFO dlion_worker.link: link to b: closed",
            "exit code 3: terminate called",
        ),
    ],
)
def test_an_informational_line_is_not_a_cause(tmp_path: Path, line: str, expected: str) -> None:
    """The program calls os._exit(3)."""
    log = tmp_path / "log"
    log.write_text(f"{line}\n{START}\n")
    failure = read_failure(3, log)
    assert failure.code == ExitCode.PROGRAM, "no exit code of DLion"
    assert read_failure(134, log).code == ExitCode.FAILED, "a signal"
    assert expected in failure.message
    assert "link to" not in failure.message


def test_the_last_of_several_counts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"{FIRST}\n{RECORD}once\n{SECOND}\n{RECORD}twice\n")
    assert last_traceback(log_tail(log)) == SECOND


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\n", RECORD.encode() + b"no\n", b"a Traceback (most recent call last):\n"],
)
def test_a_log_without_a_traceback_gives_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "log").write_bytes(content)
    assert last_traceback(log_tail(tmp_path / "log")) == ""
    assert last_traceback(log_tail(tmp_path / "none")) == ""


def test_a_traceback_without_end_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"{FIRST.splitlines()[0]}\n" + "  x\x1b[2J\n" * 6_000 + "ValueError: deep\n")
    found = last_traceback(log_tail(log))
    assert len(found) <= 16 * 1024
    assert found.endswith("ValueError: deep")


def test_workers_with_the_same_failure_share_one_message() -> None:
    same, other = (WorkerFailure(ExitCode.PROGRAM, words) for words in ("no layer", "no data"))
    messages = failure_messages([(Rank(0), same), (Rank(1), other), (Rank(2), same)])
    assert messages == [
        "workers 0, 2 ended with PROGRAM (67): no layer",
        "worker 1 ended with PROGRAM (67): no data",
    ]
