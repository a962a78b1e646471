"""Test the exit codes of cluster commands, with scripted API servers.

A command ends with the exit code that docs/errors-and-exit-codes.md has for the answer, whichever
request it is. It prints one message to standard error. So does one whose list of objects is none.

Left out: the message of each answer (test_cluster_words.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlion_api.exit_codes import ExitCode
from dlion_cli.__main__ import main
from scripted_servers import Server, served

COMMANDS = (
    ["get", "digits"], ["describe", "digits"], ["events", "digits"], ["fetch", "digits"],
    ["top", "digits"], ["wait", "digits"], ["suspend", "digits"],
    ["scale", "digits", "--site", "plant-a", "--group", "w", "--workers", "3"],
    ["delete", "digits", "--yes"],
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (401, ExitCode.DENIED),
        (403, ExitCode.DENIED),
        (404, ExitCode.UNAVAILABLE),
        (409, ExitCode.DENIED),
        (422, ExitCode.SPEC),
        (503, ExitCode.UNAVAILABLE),
    ],
)
def test_a_refusal_ends_every_command_with_its_code(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    status: int,
    expected: ExitCode,
) -> None:
    if command[0] == "wait" and status == 503:
        pytest.skip("waits until the server is back")
    refusal = status, json.dumps({"message": "no", "reason": "Some"})
    with served(tmp_path / "config", {"x": Server({"digits": refusal})}) as config:
        code = main([*command, "--kubeconfig", config])
    captured = capsys.readouterr()
    assert (code, captured.out) == (expected, ""), captured.err
    assert captured.err.startswith("dlion: ")
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_an_answer_that_is_nested_too_deep_ends_every_command_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    nested = 200, '{"spec": ' + "[" * 100_000
    with served(tmp_path / "config", {"x": Server({"digits": nested})}) as config:
        code = main([*command, "--kubeconfig", config])
    captured = capsys.readouterr()
    assert (code, captured.out) == (ExitCode.UNAVAILABLE, ""), captured.err
    assert "which is not a JSON document" in captured.err


LISTS = ("dlionjobs", "pods", "events", "services", "nodes")


@pytest.mark.parametrize("items", [5, "x", {"a": 1}, [5], ["x"]], ids=json.dumps)
@pytest.mark.parametrize(
    "command",
    [["get"], ["get", "-A"], ["logs", "digits"], ["events", "digits"], ["top", "digits"]],
    ids=" ".join,
)
def test_a_list_that_is_none_ends_every_command_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], items: object
) -> None:
    job = 200, json.dumps({"metadata": {"name": "digits", "uid": "u"}, "spec": {}, "status": {}})
    odd = 200, json.dumps({"items": items, "metadata": {}})
    server = Server({"digits": job} | dict.fromkeys(LISTS, odd))
    with served(tmp_path / "config", {"x": server}) as config:
        code = main([*command, "--kubeconfig", config])
    captured = capsys.readouterr()
    assert (code, captured.out) == (ExitCode.UNAVAILABLE, ""), captured.err
    assert captured.err.startswith("dlion: ")
    assert "no list of objects" in captured.err
