"""Test what `dlion suspend --wait` and `dlion resume --wait` report of a run that ends meanwhile.

- Such a run was neither suspended nor resumed: the exit code and message are those of its end.
- All jobs are changed before it waits for any, whatever becomes of the first.
- The time limit of commands that wait is a finite number.

Left out: suspending and resuming workers (tests/cluster/test_cli.py).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from dlion_api.exit_codes import ExitCode
from dlion_cli.__main__ import main
from manifest_table import changed, smallest
from scripted_servers import Server, served

if TYPE_CHECKING:
    from pathlib import Path


def job(*, suspend: bool, name: str = "digits", **conditions: str) -> dict[str, Any]:
    """Return an observed job; `conditions` are true, for these reasons."""
    made = changed(smallest(), {"spec.runId": "1", "spec.suspend": suspend})
    made["metadata"] = {"name": name, "uid": "u", "resourceVersion": "7", "generation": 1}
    held = [{"type": t, "status": "True", "reason": why} for t, why in conditions.items()]
    return made | {"status": {"runId": "1", "observedGeneration": 1, "conditions": held}}


@pytest.mark.parametrize("command", ["suspend", "resume"])
@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ({"Succeeded": "Completed"}, ExitCode.OK, "digits has succeeded"),
        ({"Failed": "ProgramFailed"}, ExitCode.PROGRAM, "digits has failed (ProgramFailed)"),
        ({"Failed": "DeadlineExceeded"}, ExitCode.DEADLINE, "digits has failed (DeadlineExceeded)"),
        ({"Failed": "WorkersFailed"}, ExitCode.FAILED, "digits has failed (WorkersFailed)"),
    ],
)
def test_a_run_that_ends_meanwhile_has_its_exit_code(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    end: dict[str, str],
    code: ExitCode,
    words: str,
) -> None:
    given = command == "suspend"
    before, after = job(suspend=not given), job(suspend=given, **end)
    scripted: Server

    def read() -> tuple[int, str]:
        return 200, json.dumps(after if scripted.patches else before)

    scripted = Server({"digits": read, "PATCH": (200, json.dumps(after))})
    with served(tmp_path / "config", {"x": scripted}) as config:
        assert main([command, "digits", "--wait", "--kubeconfig", config]) == code
    captured = capsys.readouterr()
    assert words in captured.out + captured.err
    assert "was not" not in captured.err


@pytest.mark.parametrize("command", ["suspend", "resume"])
@pytest.mark.parametrize("end", [{"Failed": "ProgramFailed"}, {}])
def test_a_job_that_ends_or_waits_holds_no_other_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, end: dict[str, str]
) -> None:
    given = command == "suspend"
    reached = {"Suspended" if given else "Ready": "Done"}
    scripted: Server

    def read(name: str, **after: str) -> tuple[int, str]:
        is_changed = any(f"/{name}?" in address for address, _, _ in scripted.patches)
        now = job(suspend=given, name=name, **after) if is_changed else None
        return 200, json.dumps(now or job(suspend=not given, name=name))

    answers = {"first": lambda: read("first", **end), "second": lambda: read("second", **reached)}
    scripted = Server({**answers, "watch": (200, ""), "PATCH": (200, "{}")})
    with served(tmp_path / "config", {"x": scripted}) as config:
        words = [command, "first", "second", "--wait", "--timeout", "0.3", "--kubeconfig", config]
        assert main(words) == (ExitCode.PROGRAM if end else ExitCode.DEADLINE)
    assert len(scripted.patches) == 2
    captured = capsys.readouterr()
    assert ("first was not" in captured.err) == (not end)


@pytest.mark.parametrize("command", ["suspend", "resume", "wait", "watch"])
@pytest.mark.parametrize("timeout", ["inf", "nan", "0"])
def test_a_time_limit_is_a_finite_number(command: str, timeout: str) -> None:
    assert main([command, "digits", "--timeout", timeout]) == ExitCode.USAGE
