"""Test the child processes of a comparison.

A failed process is reported with its own exit code and last output. No process starts after all
were terminated.

Left out: what the processes do.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from dlion_api.errors import DLionError
from dlion_api.exit_codes import ExitCode
from dlion_cli.comparison.child_processes import ChildProcesses, subprocess_error
from dlion_cli.terminal.failures import exit_code_of, message_of
from failing_commands import fails, is_killed

WORDS = "a warning\n0:00 elapsed\ndlion: data: no such file: x.npz\n  and more"


def output_of(code: int) -> tuple[int, str]:
    return ChildProcesses().run(fails, [str(int(code)), WORDS])


@pytest.mark.parametrize("code", [ExitCode.DATA, ExitCode.PROGRAM, ExitCode.STORAGE, ExitCode.SPEC])
def test_a_runs_own_exit_code_and_error_lines_are_reported(code: ExitCode) -> None:
    error = subprocess_error("homo-b/full", *output_of(code))
    assert exit_code_of(error) is code
    assert message_of(error) == "homo-b/full: data: no such file: x.npz\n  and more"


@pytest.mark.parametrize("code", [ExitCode.FAILED, 99])
def test_the_whole_output_of_an_unexpected_failure_is_reported(code: int) -> None:
    error = subprocess_error("homo-b/full", *output_of(code))
    assert exit_code_of(error) is ExitCode.FAILED
    assert "a warning" in message_of(error)


def test_a_killed_process_is_reported_with_its_signal() -> None:
    error = subprocess_error("homo-b/full", *ChildProcesses().run(is_killed, ["9"]))
    assert exit_code_of(error) is ExitCode.UNAVAILABLE
    assert "SIGKILL" in message_of(error)
    assert "--jobs" in message_of(error)


def test_each_of_several_processes_has_its_own_exit_code() -> None:
    """The start of one process polls the exit codes of all."""
    processes = ChildProcesses()
    with ThreadPoolExecutor(4) as threads:
        codes = threads.map(lambda code: processes.run(fails, [str(code), ""])[0], range(1, 41))
        assert list(codes) == list(range(1, 41))


def test_no_process_starts_after_all_were_terminated() -> None:
    processes = ChildProcesses()
    processes.terminate_all()
    with pytest.raises(DLionError, match="terminated"):
        processes.run(fails, ["0", ""])
