"""Test the watcher of restarts in a supervisor's log.

Each restart is reported once: with the end of the trainer, its last output in that life, the count
and the wait. Earlier lines, incomplete lines and output of the program are not restarts. For a
signal only the fault handler's line is reported.

Left out: a supervisor that writes the lines (tests/local/test_restarts.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlion_api.names import Rank
from dlion_local.runner.log_limit import MAX_LOG_BYTES
from dlion_local.runner.restart_watcher import RestartWatcher


class WatchedLog:
    """A log that is watched from its second line on, and the reports about it."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "worker-2.log"
        self.words: list[str] = []
        self.log.write_text(supervisor("restarting", code=1, wait_s=1.0, restart=1, most=10))
        self.restarts = RestartWatcher(lambda rank, reason, words: self._take(rank, reason, words))
        self.restarts.watch(Rank(2), self.log)

    def _take(self, rank: Rank, reason: str, words: str) -> None:
        assert (rank, reason) == (2, "TrainerEnded")
        self.words.append(words)

    def add(self, text: str) -> None:
        with self.log.open("a") as log:
            log.write(text)
        self.restarts.poll()


def supervisor(event: str, **details: object) -> str:
    return json.dumps({"time": "2026-01-01", "supervisor": event, **details}) + "\n"


def test_a_restart_is_reported_with_the_trainers_last_output(tmp_path: Path) -> None:
    watched = WatchedLog(tmp_path)
    watched.add(supervisor("started", pid=7) + "terminate called after bad_alloc\n\n")
    watched.add(supervisor("exited", signal="SIGABRT"))
    assert watched.words == []
    watched.add(supervisor("restarting", signal="SIGABRT", wait_s=2.0, restart=2, most=10))
    watched.add("")
    (words,) = watched.words
    assert words == (
        "its trainer ended with signal SIGABRT: terminate called after bad_alloc; "
        "restart 2 of 10 in 2.0 s"
    )


FAULT = """Fatal Python error: Segmentation fault

Thread 0x00007f1 (most recent call first):
  File "other.py", line 9 in wait

Current thread 0x00007f2 (most recent call first):
  File "program.py", line 41 in nap
  File "loop.py", line 3 in run

Extension modules: numpy.core._multiarray_umath, yaml._yaml (total: 2)
"""


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (f"step 7\n{FAULT}", ': Segmentation fault at File "program.py", line 41 in nap'),
        ("2026-01-01 10:00:00 ERROR a.b: a peer is late\nstep 7\n", ""),
        ("", ""),
    ],
)
def test_a_signal_is_reported_with_the_fault_handlers_line_only(
    tmp_path: Path, lines: str, reason: str
) -> None:
    watched = WatchedLog(tmp_path)
    watched.add(supervisor("started", pid=7) + lines)
    watched.add(supervisor("restarting", signal="SIGSEGV", wait_s=2.0, restart=2, most=10))
    assert watched.words == [
        f"its trainer ended with signal SIGSEGV{reason}; restart 2 of 10 in 2.0 s"
    ]


def test_colours_are_removed(tmp_path: Path) -> None:
    watched = WatchedLog(tmp_path)
    watched.add(supervisor("started", pid=7) + "2026-01-01 10:00:00 ERROR a.b: \x1b[1mbad\x1b[0m\n")
    watched.add(supervisor("restarting", code=1, wait_s=2.0, restart=2, most=10))
    assert "1 (FAILED): bad; restart" in watched.words[0]


def test_output_of_an_earlier_trainer_is_not_reported_again(tmp_path: Path) -> None:
    watched = WatchedLog(tmp_path)
    watched.add("2026-01-01 10:00:00 ERROR a.b: no room\n" + supervisor("started", pid=8))
    watched.add(supervisor("restarting", code=69, wait_s=1.0, restart=1, most=3))
    assert watched.words == [
        "its trainer ended with exit code 69 (UNAVAILABLE); restart 1 of 3 in 1.0 s"
    ]


def test_an_incomplete_line_waits_and_lines_of_the_program_do_not_count(
    tmp_path: Path,
) -> None:
    watched = WatchedLog(tmp_path)
    line = supervisor("restarting", code=3, wait_s=1.0, restart=1, most=3)
    watched.add('{"time": 1}\n{"time" no JSON\n' + line[:20])
    assert watched.words == []
    watched.add(line[20:])
    assert len(watched.words) == 1


def test_a_restart_in_a_truncated_log_is_reported_once(tmp_path: Path) -> None:
    watched = WatchedLog(tmp_path)
    watched.add(("x" * 200_000 + "\n") * (MAX_LOG_BYTES // 200_000 + 2))
    assert watched.log.stat().st_size < MAX_LOG_BYTES
    watched.add(supervisor("restarting", code=3, wait_s=1.0, restart=1, most=3))
    for _ in range(MAX_LOG_BYTES >> 20):
        watched.restarts.poll()
    assert len(watched.words) == 1


def test_a_missing_log_is_not_an_error(tmp_path: Path) -> None:
    watched = WatchedLog(tmp_path)
    watched.log.unlink()
    watched.restarts.poll()
