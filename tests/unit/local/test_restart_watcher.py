"""Facts: each restart that a supervisor's log tells of is told once, with how the trainer ended,
what it said last in that life, the count and the wait; lines that came before, torn lines and what
a program prints itself are no restarts. Of a signal only the fault handler's line is told.

Left out: a supervisor that writes them (tests/local/test_restarts.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlion_api.names import Rank
from dlion_local.runner.log_limit import MAX_LOG_BYTES
from dlion_local.runner.restart_watcher import RestartWatcher


class Told:
    """A log that is watched from its second line on, and what was told."""

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


def test_a_restart_is_told_with_what_the_trainer_said_last(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.add(supervisor("started", pid=7) + "terminate called after bad_alloc\n\n")
    told.add(supervisor("exited", signal="SIGABRT"))
    assert told.words == []
    told.add(supervisor("restarting", signal="SIGABRT", wait_s=2.0, restart=2, most=10))
    told.add("")
    (words,) = told.words
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
    ("lines", "said"),
    [
        (f"step 7\n{FAULT}", ': Segmentation fault at File "program.py", line 41 in nap'),
        ("2026-01-01 10:00:00 ERROR a.b: a peer is late\nstep 7\n", ""),
        ("", ""),
    ],
)
def test_a_signal_is_told_with_the_fault_handlers_line_alone(
    tmp_path: Path, lines: str, said: str
) -> None:
    told = Told(tmp_path)
    told.add(supervisor("started", pid=7) + lines)
    told.add(supervisor("restarting", signal="SIGSEGV", wait_s=2.0, restart=2, most=10))
    assert told.words == [f"its trainer ended with signal SIGSEGV{said}; restart 2 of 10 in 2.0 s"]


def test_colours_are_not_told(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.add(supervisor("started", pid=7) + "2026-01-01 10:00:00 ERROR a.b: \x1b[1mbad\x1b[0m\n")
    told.add(supervisor("restarting", code=1, wait_s=2.0, restart=2, most=10))
    assert "1 (FAILED): bad; restart" in told.words[0]


def test_what_an_earlier_trainer_said_is_not_said_again(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.add("2026-01-01 10:00:00 ERROR a.b: no room\n" + supervisor("started", pid=8))
    told.add(supervisor("restarting", code=69, wait_s=1.0, restart=1, most=3))
    assert told.words == [
        "its trainer ended with exit code 69 (UNAVAILABLE); restart 1 of 3 in 1.0 s"
    ]


def test_a_torn_line_waits_for_its_end_and_a_programs_own_lines_count_for_nothing(
    tmp_path: Path,
) -> None:
    told = Told(tmp_path)
    line = supervisor("restarting", code=3, wait_s=1.0, restart=1, most=3)
    told.add('{"time": 1}\n{"time" no JSON\n' + line[:20])
    assert told.words == []
    told.add(line[20:])
    assert len(told.words) == 1


def test_a_restart_in_a_log_that_is_cut_is_told_once(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.add(("x" * 200_000 + "\n") * (MAX_LOG_BYTES // 200_000 + 2))
    assert told.log.stat().st_size < MAX_LOG_BYTES
    told.add(supervisor("restarting", code=3, wait_s=1.0, restart=1, most=3))
    for _ in range(MAX_LOG_BYTES >> 20):
        told.restarts.poll()
    assert len(told.words) == 1


def test_a_log_that_is_gone_is_no_error(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.log.unlink()
    told.restarts.poll()
