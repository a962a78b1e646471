"""Test `dlion delete` of several jobs, with a server that answers as an API server does.

Left out: a real API server, the confirmation and finalizers (tests/cluster/test_cli.py).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from dlion_api.exit_codes import ExitCode
from dlion_cli.__main__ import main
from manifest_table import smallest
from scripted_servers import PATCHES, Server, served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from scripted_servers import Answer


NOT_THERE: Answer = (404, json.dumps({"details": {"kind": "dlionjobs", "name": "some"}}))


def stored(name: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "ml", "uid": f"uid-{name}", "resourceVersion": "1"}
    return {**smallest(), "metadata": metadata}


def deleted(script: Server) -> list[str]:
    return [address.rpartition("/")[2] for address, _, _ in script.patches]


def answer_to_deletion(script: Server) -> Answer:
    """Another client has deleted `ended` since it was read."""
    if deleted(script)[-1] == "ended":
        return NOT_THERE
    if deleted(script)[-1] == "created-again":  # the precondition names the UID of the first one
        return 409, json.dumps({"reason": "Conflict", "message": "the UID in the precondition"})
    return 200, "{}"


def until_deleted(name: str, script: Server) -> Answer:
    if name in deleted(script):
        return NOT_THERE
    return 200, json.dumps(stored(name))


@pytest.fixture
def script() -> Server:
    """The job `blocked` stays, as by a finalizer."""
    blocked = stored("blocked")
    blocked["metadata"]["finalizers"] = ["example.com/slow"]
    answers: dict[str, Any] = {
        "blocked": (200, json.dumps(blocked)),
        "free": lambda: until_deleted("free", made),
        "watch": (200, ""),
        "ended": (200, json.dumps(stored("ended"))),
        "created-again": (200, json.dumps(stored("created-again"))),
        PATCHES: lambda: answer_to_deletion(made),
    }
    made = Server(answers)
    return made


@pytest.fixture
def kubeconfig(tmp_path: Path, script: Server) -> Iterator[str]:
    with served(tmp_path / "kubeconfig", {"a": script}) as file:
        yield file


def test_a_job_that_stays_holds_no_other_back(
    kubeconfig: str, script: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["delete", "blocked", "free", "--yes", "--timeout", "0.3", "--kubeconfig", kubeconfig]
    assert main(words) == ExitCode.DEADLINE
    assert deleted(script) == ["blocked", "free"]
    captured = capsys.readouterr()
    assert captured.out == "dlionjob.dlion.dev/free deleted\n"
    assert "blocked still exists after 0.3 s; it waits for example.com/slow" in captured.err


def test_without_waiting_all_are_deleted(
    kubeconfig: str, script: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["delete", "blocked", "free", "--yes", "--no-wait", "--kubeconfig", kubeconfig]
    assert main(words) == 0
    assert deleted(script) == ["blocked", "free"]
    assert capsys.readouterr().out.count("is being deleted") == 2


def test_a_job_that_is_deleted_meanwhile_holds_no_other_back(
    kubeconfig: str, script: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["delete", "ended", "free", "--yes", "--no-wait", "--kubeconfig", kubeconfig]
    assert main(words) == 0
    assert deleted(script) == ["ended", "free"]
    assert capsys.readouterr() == (
        "dlionjob.dlion.dev/ended deleted\ndlionjob.dlion.dev/free is being deleted\n",
        "",
    )


@pytest.mark.parametrize(
    ("options", "printed"), [(["--no-wait"], "is being deleted"), ([], "deleted")]
)
def test_a_job_that_is_created_again_holds_no_other_back(
    kubeconfig: str,
    script: Server,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    printed: str,
) -> None:
    words = ["delete", "created-again", "free", "--yes", *options, "--kubeconfig", kubeconfig]
    assert main(words) == ExitCode.DENIED
    assert deleted(script) == ["created-again", "free"]
    captured = capsys.readouterr()
    assert captured.out == f"dlionjob.dlion.dev/free {printed}\n"
    assert "the UID in the precondition" in captured.err
