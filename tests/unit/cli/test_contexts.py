"""Test `--contexts a,b,c`: requests to several clusters, with scripted servers.

- The jobs of all contexts appear in one table, one list, one log.
- A failing context is named with its reason, hides no other, and determines the exit code.
- `watch` ends when all jobs have ended, with the first nonzero code in the order of the contexts. A
  terminal gets one live view.
- A slow reader gets the whole of a followed log.

Left out: real API servers (tests/cluster/test_cli.py).
"""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from rich.console import Console

from dlion_api.exit_codes import ExitCode
from dlion_cli.__main__ import main
from dlion_cli.commands.cluster.logs import _DRAIN_S
from dlion_cli.views.job_status import JobStatus
from dlion_cli.views.multi_context_watch import MultiContextView
from scripted_servers import Server, served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from scripted_servers import Answer

NOT_THERE: Answer = (404, json.dumps({"details": {"kind": "dlionjobs", "name": "digits"}}))
MAY_NOT: Answer = (
    403,
    json.dumps({"message": 'User "jane" cannot get resource "pods/log" in API group ""'}),
)


def job(state: str, *, version: int = 1, reason: str = "", workers: str = "2/2") -> dict[str, Any]:
    """Return a job; with a reason, one that has ended."""
    ended = "Succeeded" if reason == "Completed" else "Failed"
    conditions = [{"type": ended, "status": "True", "reason": reason}] if reason else []
    return {
        "metadata": {
            "name": "digits", "namespace": "ml", "uid": "u", "resourceVersion": str(version),
            "managedFields": [{}],
        },
        "spec": {"runId": "1"},
        "status": {"state": state, "runId": "1", "readyWorkers": workers, "conditions": conditions},
    }  # fmt: skip


def pod(name: str, index: int) -> dict[str, Any]:
    labels = {"dlion.dev/group": "small", "batch.kubernetes.io/job-completion-index": str(index)}
    made = {"name": name, "creationTimestamp": f"2026-01-31T12:00:0{index}Z", "labels": labels}
    return {"metadata": made}


def training(*jobs: dict[str, Any], **more: Answer) -> Server:
    """Return a server with these jobs, the first of which can be read by name."""
    listed = (200, json.dumps({"items": jobs}))
    return Server({"dlionjobs": listed, "digits": (200, json.dumps(jobs[0])), **more})


def watched(*jobs: dict[str, Any]) -> Answer:
    return 200, "".join(json.dumps({"type": "MODIFIED", "object": each}) + "\n" for each in jobs)


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Return a file with a context for each given server."""
    with ExitStack() as stack:

        def made(**servers: Server | None) -> str:
            return stack.enter_context(served(tmp_path / "kubeconfig", servers))

        yield made


def test_a_table_of_all_contexts(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = kubeconfig(a=training(job("Training"), job("Waiting")), b=training(job("Degraded")))
    assert main(["get", "--contexts", "b, a", "--kubeconfig", file]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["CONTEXT", "NAME", "STATE"]
    assert [row.split()[:3] for row in rows] == [
        ["b", "digits", "Degraded"], ["a", "digits", "Training"], ["a", "digits", "Waiting"],
    ]  # fmt: skip
    assert main(["get", "digits", "-o", "wide", "--contexts=a,b", "--kubeconfig", file]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:3] for row in rows] == [
        ["a", "digits", "Training"], ["b", "digits", "Degraded"],
    ]  # fmt: skip
    assert main(["get", "-A", "-o", "name", "--contexts=b", "--kubeconfig", file]) == 0
    assert capsys.readouterr().out == "b dlionjob.dlion.dev/digits\n"


@pytest.mark.parametrize("output", ["table", "json", "yaml"])
def test_a_failing_context_hides_no_other(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str], output: str
) -> None:
    file = kubeconfig(
        a=Server({"digits": NOT_THERE}),
        b=training(job("Training")),
        c=None,
        d=Server({"digits": MAY_NOT}),
    )
    order = "d,nowhere,a,b,c"
    command = ["get", "digits", "-o", output, "--contexts", order, "--kubeconfig", file]
    assert main(command) == ExitCode.DENIED  # the code of the first of them
    captured = capsys.readouterr()
    complaints = captured.err.splitlines()
    assert [line.split(":")[1] for line in complaints] == [
        " context d", " context nowhere", " context a", " context c"
    ]  # fmt: skip
    assert "there is no context 'nowhere'" in complaints[1]
    assert "no DLionJob 'digits'" in complaints[2]
    assert "nothing listens there" in complaints[3]
    if output == "table":
        assert [row.split()[:3] for row in captured.out.splitlines()[1:]] == [
            ["b", "digits", "Training"]
        ]
        return
    listed = json.loads(captured.out) if output == "json" else yaml.safe_load(captured.out)
    assert [each["context"] for each in listed] == order.split(",")
    assert [len(each["items"]) for each in listed] == [0, 0, 0, 1, 0]
    assert [each["error"] is None for each in listed] == [False, False, False, True, False]
    assert "managedFields" not in listed[3]["items"][0]["metadata"]


def test_no_jobs_in_any_context_are_not_an_error(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    none = Server({"dlionjobs": (200, json.dumps({"items": []}))})
    assert main(["get", "--contexts", "a,b", "--kubeconfig", kubeconfig(a=none, b=none)]) == 0
    assert "there are no DLionJobs in a, b" in capsys.readouterr().err


ENDED: dict[str, Server] = {
    "a": training(job("Training"), watch=watched(job("Succeeded", version=2, reason="Completed"))),
    "b": training(job("Waiting"), watch=watched(job("Failed", version=2, reason="ProgramFailed"))),
    "c": training(job("Failed", reason="InvalidSpec")),
}


@pytest.mark.parametrize(
    ("order", "code"), [("a,b,c", ExitCode.PROGRAM), ("c,b", ExitCode.SPEC), ("a", ExitCode.OK)]
)
def test_watch_ends_with_all_and_with_the_first_failure(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str], order: str, code: ExitCode
) -> None:
    command = ["watch", "digits", "--contexts", order, "--kubeconfig", kubeconfig(**ENDED)]
    assert main(command) == code
    lines = [line.split("  ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    if "b" in order:
        assert [line for line in lines if line.startswith("b  ") and "Failed=" not in line] == [
            "b  Waiting, —, ETA —, sites —, workers 2/2, — steps/s",
            "b  Failed, —, ETA —, sites —, workers 2/2, — steps/s",
        ]
    assert {line.split()[0] for line in lines} == set(order.split(","))
    assert main([*command, "-o", "json"]) == code
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {each["context"] for each in found} == set(order.split(","))
    assert not any("managedFields" in each["job"]["metadata"] for each in found)


def test_watch_reports_a_failing_context_and_a_deleted_job(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    gone = (200, json.dumps({"type": "DELETED", "object": job("Training")}) + "\n")
    file = kubeconfig(a=ENDED["a"], b=training(job("Training"), watch=gone), c=None)
    command = ["watch", "digits", "--contexts", "a,b,c", "--kubeconfig", file]
    for output in ("text", "json"):
        assert main([*command, "-o", output]) == ExitCode.UNAVAILABLE
        captured = capsys.readouterr()
        assert "context b: DLionJob 'digits' was deleted" in captured.err
        assert "context c: no API server answers" in captured.err
        assert "Succeeded" in captured.out


def test_watch_of_each_context_ends_at_the_time_limit(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = kubeconfig(a=ENDED["a"], b=training(job("Training"), watch=(200, "")))
    command = ["watch", "digits", "--contexts", "a,b", "--kubeconfig", file]
    assert main([*command, "--timeout", "0.2"]) == ExitCode.DEADLINE
    assert "context b: digits has not ended within 0.2 s" in capsys.readouterr().err


def test_ctrl_c_ends_the_watch_of_all(kubeconfig: Callable[..., str]) -> None:
    server = training(job("Training"), watch=(200, ""))
    command = [sys.executable, "-m", "dlion_cli", "watch", "digits", "--contexts", "a,b"]
    with subprocess.Popen(
        [*command, "--kubeconfig", kubeconfig(a=server, b=server)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A background process of a shell ignores SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as watching:  # fmt: skip
        assert watching.stdout is not None
        contexts = {watching.stdout.readline().split()[1] for _ in range(2)}
        watching.send_signal(signal.SIGINT)
        _, message = watching.communicate(timeout=60)
    assert contexts == {"a", "b"}
    assert watching.returncode == ExitCode.INTERRUPTED
    assert message == "dlion: watch stopped. The job digits continues\n"


def test_a_terminal_gets_one_live_view() -> None:
    terminal = Console(file=io.StringIO(), width=160, force_terminal=True)
    view = MultiContextView(terminal)
    view.update("b", JobStatus(job("Training")))
    view.update("a", JobStatus(job("Waiting")))
    view.connection_lost("b", "no answer")

    def picture() -> list[str]:
        plain = Console(file=io.StringIO(), width=160)
        plain.print(view.render())
        assert isinstance(plain.file, io.StringIO)
        return plain.file.getvalue().splitlines()

    rows = picture()
    assert [row.split()[:3] for row in rows[1:3]] == [
        ["a", "digits", "Waiting"], ["b", "digits", "Training"],
    ]  # fmt: skip
    assert rows[3].strip() == "b: connection lost, retrying: no answer"
    view.update("b", JobStatus(job("Training", version=2)))
    assert len(picture()) == 3


def log(*lines: str) -> Answer:
    return 200, "".join(f"2026-01-31T12:00:{line}\n" for line in lines)


def test_logs_of_all_contexts_have_their_names(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    pods = (200, json.dumps({"items": [pod("w-0", 0)]}))
    none = (200, json.dumps({"items": []}))
    file = kubeconfig(
        a=training(job("Training"), pods=pods, log=log("01Z one", "03Z three")),
        b=training(job("Training"), pods=pods, log=log("02Z two")),
        c=training(job("Training"), pods=pods, log=MAY_NOT),
        d=training(job("Training"), pods=none),
    )
    command = ["logs", "digits", "--kubeconfig", file, "--contexts"]
    assert main([*command, "a,b"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a/small-0 | one", "b/small-0 | two", "a/small-0 | three",
    ]  # fmt: skip
    assert main([*command, "a,c,d"]) == ExitCode.DENIED
    captured = capsys.readouterr()
    assert [line.split(" | ")[1] for line in captured.out.splitlines()] == ["one", "three"]
    assert "context c: " in captured.err
    assert "context d: run 1 of digits has no pods of workers at this site" in captured.err


def test_logs_of_all_contexts_are_followed_to_the_end(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    ended = job("Succeeded", reason="Completed")
    none = (200, json.dumps({"items": []}))
    pods = (200, json.dumps({"items": [pod("w-0", 0)]}))
    file = kubeconfig(
        a=training(ended, pods=pods, log=log("01Z one")), b=training(ended, pods=none)
    )
    command = ["logs", "digits", "-f", "--kubeconfig", file, "--contexts", "a,b"]
    assert main(command) == ExitCode.UNAVAILABLE
    captured = capsys.readouterr()
    assert "a/small-0 | one" in captured.out.splitlines()
    assert "context b: run 1 of digits has no pods" in captured.err


def test_a_log_is_followed_while_the_api_server_restarts(
    kubeconfig: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One list of pods fails after the job was read. The run has ended at the next reading."""
    monkeypatch.setattr("dlion_cli.commands.cluster.logs._POLL_INTERVAL_S", 0.01)
    reads = failures = 0

    def read_job() -> Answer:
        nonlocal reads
        reads += 1
        state = job("Training") if reads <= 3 else job("Succeeded", reason="Completed")
        return 200, json.dumps(state)

    def list_pods() -> Answer:
        nonlocal failures
        if reads == 3:
            failures += 1
            return 503, "{}"
        return 200, json.dumps({"items": [pod("w-0", 0)]})

    file = kubeconfig(a=Server({"digits": read_job, "pods": list_pods, "log": log("01Z one")}))
    assert main(["logs", "digits", "-f", "--kubeconfig", file]) == 0
    assert failures == 1
    assert capsys.readouterr().out.splitlines() == ["small-0 | one"]


def test_a_slow_reader_gets_a_whole_long_log_after_the_end(
    kubeconfig: Callable[..., str],
) -> None:
    """The reader begins after the time limit for a silent worker."""
    lines = [f"01.{number:06}Z {number} {'x' * 90}" for number in range(1, 4001)]
    pods = (200, json.dumps({"items": [pod("w-0", 0)]}))
    ended = job("Succeeded", reason="Completed")
    file = kubeconfig(a=training(ended, pods=pods, log=log(*lines)))
    command = [sys.executable, "-m", "dlion_cli", "logs", "digits", "-f", "--kubeconfig", file]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(2 * _DRAIN_S)
        received = [first, *process.stdout]
    assert [int(line.split()[2]) for line in received] == [*range(1, 4001)]
    assert process.returncode == 0


@pytest.mark.parametrize("namespace", ["..", "a/b", "\udcff"])
def test_what_is_no_namespace_is_refused(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str], namespace: str
) -> None:
    """`..` would be the address of all namespaces. The last one is not UTF-8."""
    server = training(job("Training"))
    assert main(["get", "-n", namespace, "--kubeconfig", kubeconfig(a=server)]) == ExitCode.SPEC
    assert server.asked == []
    assert "namespace: is not a namespace's name" in capsys.readouterr().err


@pytest.mark.parametrize("group", ["", "a,b=c", "g" * 17, "\udcff"])
def test_what_is_no_group_is_refused(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str], group: str
) -> None:
    """The second would select by another label. The last one is not UTF-8."""
    server = training(job("Succeeded", reason="Completed"))
    arguments = ["logs", "digits", "--group", group, "--kubeconfig", kubeconfig(a=server)]
    assert main(arguments) == ExitCode.SPEC
    assert server.asked == []
    assert "group: is not a group's name" in capsys.readouterr().err


def test_an_authority_whose_name_is_not_utf_8_is_not_found(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = kubeconfig(a=training(job("Training")))
    arguments = ["trust", "show", "--authority", "\udcff", "--kubeconfig", file]
    assert main(arguments) == ExitCode.UNAVAILABLE
    assert "bug" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["get", "--contexts", "a", "--context", "a"],
        ["get", "--contexts", " , "],
        ["get", "x", "-A", "--contexts", "a"],
        ["logs", "x", "-c", "keeper", "--worker", "0", "--contexts", "a"],
        ["submit", "f", "--contexts", "a"],
    ],
)
def test_conflicting_options_are_refused(
    kubeconfig: Callable[..., str], arguments: list[str]
) -> None:
    file = kubeconfig(a=training(job("Training")))
    assert main([*arguments, "--kubeconfig", file]) == ExitCode.USAGE
