"""Test kubectl's short option `-n=NAME`.

It is read as `-nNAME`, before and after the command. A flag with a value, an option without one, an
option after `--` and `-f FILE` are refused with the correct form.

Left out: the effect of the options (tests of the commands).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlion_api.exit_codes import ExitCode
from dlion_cli.__main__ import main
from scripted_servers import Server, served


@pytest.mark.parametrize(
    "words",
    [
        ["get", "-nfarm"], ["get", "-n=farm"], ["-nfarm", "get"], ["-n=farm", "get"],
        ["-n", "farm", "get"], ["get", "-n", "farm", "--"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_the_namespace_is_read_in_each_form(tmp_path: Path, words: list[str]) -> None:
    server = Server({"dlionjobs": (200, json.dumps({"items": [], "metadata": {}}))})
    with served(tmp_path / "config", {"a": server}) as file:
        end = words.index("--") if "--" in words else len(words)
        assert main([*words[:end], "--kubeconfig", file, "-o=json", *words[end:]]) == 0
    assert any(path.endswith("/namespaces/farm/dlionjobs") for path in server.asked)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["logs", "x", "-f=true"], "-f takes no value: write -f"),
        (["get", "-n=", "x"], "-n=: the value is missing"),
        (["-n=", "get"], "-n=: the value is missing"),
        (["get", "x", "--", "-o", "json"], "-o follows --"),
        (["trust", "show", "--", "--address"], "--address follows --"),
        (["submit", "-f", "job.yaml"], "A FILE is an argument here"),
        (["submit", "-f=-"], "A FILE is an argument here"),
        (["get", "-z=1"], "No such option"),
        (["get", "-o=jsn"], "'jsn' is not one of"),
    ],
)
def test_other_forms_are_refused_with_the_correct_form(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(words) == ExitCode.USAGE
    assert message in capsys.readouterr().err


def test_a_folder_of_a_local_command_may_begin_with_a_dash(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["ls", "--", "-no-such-folder"]) == ExitCode.DATA
    assert "-no-such-folder: there is no such folder" in capsys.readouterr().err
