"""Test messages, kubeconfig rules, tables and live views of the cluster commands without a cluster.

- Each answer of an API server has its message, its kind of error and a remedy. The first of several
  kubeconfig files counts, as for kubectl.
- Documents with missing, foreign or hostile fields are shown. The live view shows progress,
  remaining time and lost connections. Changed fields are named.
- Without the Kubernetes client the commands name the command that installs it. They load quickly.

Left out: a real API server (tests/cluster/test_cli.py).
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from dlion_api.errors import (
    AbsentError,
    DataError,
    DeniedError,
    DLionError,
    SpecError,
    UnavailableError,
)
from dlion_api.exit_codes import ExitCode
from dlion_cli.__main__ import main
from dlion_cli.cluster.api_errors import (
    CredentialsRejectedError,
    api_error,
    unreachable_error,
)
from dlion_cli.cluster.connection_settings import ConnectionSettings
from dlion_cli.cluster.kubeconfig import choose_context
from dlion_cli.cluster.submission import changed_fields
from dlion_cli.views.job_status import JobStatus, outcome_exit_code
from dlion_cli.views.job_tables import list_table, one_job
from dlion_cli.views.job_view import JobProgressView
from dlion_cli.views.job_watch import print_outcome
from manifest_table import changed, smallest

JOBS = "/apis/dlion.dev/v1alpha1/namespaces/ml/dlionjobs"
NOW = datetime(2026, 1, 31, 12, 5, tzinfo=UTC)


def answer(message: str, **details: Any) -> bytes:
    return json.dumps({"kind": "Status", "message": message, "details": details}).encode()


FORBIDDEN = (
    'pods "x" is forbidden: User "jane" cannot create resource "pods/exec" in API group "" in the '
    'namespace "ml"'
)


@pytest.mark.parametrize(
    ("code", "content", "kind", "words"),
    [
        (401, answer("Unauthorized"), CredentialsRejectedError, "Log in again"),
        (403, answer(FORBIDDEN), DeniedError, "--verb=create --resource=pods/exec -n ml"),
        (403, b"\xff<html>no", DeniedError, "<html>no"),
        (404, b"404 page not found\n", AbsentError, "dlionjobs.dlion.dev is not installed"),
        (404, answer("", kind="dlionjobs", name="x"), AbsentError, "no DLionJob 'x'"),
        (404, answer("", kind="namespaces", name="x"), AbsentError, "kubectl create namespace x"),
        (404, answer("gone", kind="pods", name="x"), AbsentError, "gone"),
        (409, answer("the object has been modified"), DeniedError, "Retry"),
        (410, answer("too old"), UnavailableError, "too old"),
        (422, answer("bad", causes=[]), SpecError, "bad"),
        (429, answer("slow down"), UnavailableError, "Retry in a moment"),
        (500, b"", UnavailableError, "500"),
        (503, b"[]", UnavailableError, "503"),
        (418, answer("teapot"), UnavailableError, "418"),
        # Of a proxy, perhaps.
        (404, b'{"message": null, "details": "no route"}', AbsentError, "is not installed"),
        (404, b'{"message": "no route", "details": {"name": 5}}', AbsentError, "no route"),
        (409, b'{"message": "busy", "details": ["x"]}', DeniedError, "busy"),
        (409, b'{"message": "busy", "details": {"causes": ["x"]}}', DeniedError, "busy"),
        (422, b'{"message": "bad", "details": {"causes": 5}}', SpecError, "bad"),
        (400, b'{"message": "bad", "details": {"causes": ["x"]}}', SpecError, "bad"),
        (502, b"[" * 100_000, UnavailableError, "502"),
    ],
)
def test_each_refusal_has_its_message(
    code: int, content: bytes, kind: type[DLionError], words: str
) -> None:
    error = api_error(code, content, path=JOBS, context="here")
    assert type(error) is kind
    assert words in str(error)


def test_a_missing_api_of_others_is_no_missing_definition_of_jobs() -> None:
    path = "/apis/kueue.x-k8s.io/v1beta2/namespaces/ml/workloads/digits"
    error = api_error(404, b"404 page not found\n", path=path, context="here")
    assert type(error) is AbsentError
    assert path in str(error)
    assert "dlionjobs" not in str(error)


def test_a_refused_field_is_named_without_its_value() -> None:
    causes = [
        {"field": "spec.trainer", "message": 'Invalid value: "object": once its workers '
         "train, trainer may change only together with runId"},
        {"field": "spec.minSites", "message": "Invalid value: 65: must be at most 64"},
    ]  # fmt: skip
    error = api_error(422, answer("x", causes=causes), path=JOBS, context="c")
    assert isinstance(error, SpecError)
    first, second = error.problems
    assert first.message == "once its workers train, trainer may change only together with runId"
    assert "--set runId=" in first.advice
    assert (second.path, second.message) == ("spec.minSites", "must be at most 64")


@pytest.mark.parametrize(
    ("text", "words"),
    [("[Errno 111] Connection refused", "nothing listens"), ("Read timed out", "no answer in time"),
     ("Name or service not known", "no such host"), ("CERTIFICATE_VERIFY_FAILED", "certificate"),
     ("odd", "odd")],
)  # fmt: skip
def test_why_a_server_does_not_answer(text: str, words: str) -> None:
    message = str(unreachable_error("https://x:1", OSError(text), context="here"))
    assert words in message
    assert "https://x:1 (context 'here')" in message


# ---- kubeconfig ----------------------------------------------------------------------------------


def config(path: Path, current: str | None, **namespaces: str) -> Path:
    contexts = [
        {"name": name, "context": {"cluster": "c", "namespace": namespace}}
        for name, namespace in namespaces.items()
    ]
    document: dict[str, Any] = {"contexts": contexts}
    path.write_text(yaml.safe_dump(document | ({"current-context": current} if current else {})))
    return path


def test_of_several_files_the_first_counts(tmp_path: Path) -> None:
    first = config(tmp_path / "1", None, a="of-1")
    second = config(tmp_path / "2", "a", a="of-2", b="other")
    third = config(tmp_path / "3", "b")
    environment = {"KUBECONFIG": f"{first}:{tmp_path / 'none'}:{second}:{third}"}
    chosen = choose_context(ConnectionSettings(), environment)
    assert (chosen.name, chosen.namespace) == ("a", "of-1")
    assert chosen.files == f"{first}:{second}:{third}"
    other = choose_context(ConnectionSettings(context="b"), environment)
    assert other.namespace == "other"
    named = choose_context(ConnectionSettings(kubeconfig=str(third.with_name("2"))), environment)
    assert named.namespace == "of-2"


@pytest.mark.parametrize(
    ("content", "context", "words"),
    [
        ("contexts: []", None, "no context is the current one; it has: none"),
        ("current-context: x", None, "there is no context 'x'"),
        ("{", None, "cannot be read"),
        ("since: 2026-13-45", None, "cannot be read: month must be in 1..12"),
        ("[" * 3000, None, "cannot be read"),
        ("- 1", None, "is not a kubeconfig file"),
        ("", "x", "nothing in the kubeconfig"),
        ("contexts: [1, {name: y, context: {}}]", "x", "it has: y"),
    ],
)
def test_an_invalid_kubeconfig_is_refused(
    tmp_path: Path, content: str, context: str | None, words: str
) -> None:
    path = tmp_path / "config"
    path.write_text(content)
    with pytest.raises(DataError, match=words):
        choose_context(ConnectionSettings(kubeconfig=str(path), context=context), {})


def test_the_home_of_an_unknown_user_is_no_kubeconfig() -> None:
    """A shell passes such a path on as it is written."""
    for given, environment in (
        ("~no-such-user/config", {}),
        (None, {"KUBECONFIG": "~no-such-user/config"}),
    ):
        with pytest.raises(DataError, match="no kubeconfig file at ~no-such-user/config"):
            choose_context(ConnectionSettings(kubeconfig=given), environment)


def test_without_a_file_a_pod_finds_its_own_cluster() -> None:
    environment = {"KUBECONFIG": "/none", "KUBERNETES_SERVICE_HOST": "fd00::1"}
    cluster = choose_context(ConnectionSettings(), environment).cluster
    assert cluster["server"] == "https://[fd00::1]:443"
    with pytest.raises(DataError, match="no kubeconfig file at /none"):
        choose_context(ConnectionSettings(), {"KUBECONFIG": "/none"})
    with pytest.raises(DataError, match="/other"):
        choose_context(ConnectionSettings(kubeconfig="/other"), environment)


# ---- documents -----------------------------------------------------------------------------------


def condition(type_: str, reason: str, status: str = "True", message: str = "") -> dict[str, Any]:
    at = "2026-01-31T12:00:00Z"
    return {"type": type_, "status": status, "reason": reason, "message": message,
            "lastTransitionTime": at}  # fmt: skip


def document(**status: Any) -> dict[str, Any]:
    made = changed(smallest(), {"metadata.creationTimestamp": "2026-01-31T12:00:00Z"})
    made["metadata"] |= {"namespace": "ml", "generation": 1}
    return made | {"status": {"observedGeneration": 1, **status}}


def shown(*parts: Any, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    for part in parts:
        console.print(part)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


ODD: list[dict[str, Any]] = [
    {},
    {"metadata": None, "spec": [], "status": "x"},
    {"metadata": {"creationTimestamp": "yesterday"}, "status": {"conditions": {}, "sites": [1]}},
    {"spec": {"sites": [{"groups": [{"workers": "3"}, None]}, 7]}, "status": {"links": 1}},
    {"status": {"trainerStatus": {"progressPercentage": "42", "metrics": [{}, 3]},
                "conditions": [{}, {"lastTransitionTime": 5}]}},
    {"status": {"state": "\x1b[2J[red]", "sites": [{"name": "a\nb", "message": "[/]"}]}},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_malformed_documents_are_shown(odd: dict[str, Any]) -> None:
    job = JobStatus(odd)
    text = shown(*one_job(job, [{}, {"message": "m"}], NOW))
    text += shown(list_table([job], NOW, wide=True, everywhere=True))
    console = Console(file=io.StringIO(), width=200)
    view = JobProgressView(job, console)
    view.update(job, [{}])
    text += shown(view.render())
    assert "STATE" in text
    assert "\x1b" not in text


def test_a_wide_row_has_run_figures_and_reason() -> None:
    job = JobStatus(
        document(
            state="Degraded",
            conditions=[condition("Ready", "Training"), condition("Degraded", "PeersLost")],
            trainerStatus={
                "progressPercentage": 42,
                "estimatedRemainingSeconds": 90,
                "metrics": [{"name": "loss", "value": "0.31"}],
            },
        )
    )
    row = shown(list_table([job], NOW, wide=True, everywhere=True)).splitlines()[1].split()
    assert row == [
        "ml", "digits", "Degraded", "42", "%", "—", "—", "—", "5m", "—", "1:30", "0.31", "—",
        "—", "Training",
    ]  # fmt: skip


def test_the_links_of_each_pair_of_sites_are_shown() -> None:
    pairs = [
        {"pair": "plant-a to plant-b", "connected": 3, "expected": 4, "megabitsPerSecond": "48.9"},
        {"pair": "plant-b to plant-a", "connected": 4, "expected": 4, "megabitsPerSecond": ""},
    ]
    job = JobStatus(document(links={"connected": 3, "expected": 4, "pairs": pairs}))
    lines = [line.split() for line in shown(*one_job(job, [], NOW)).splitlines()]
    assert ["FROM", "TO", "LINKS", "MBIT/S"] in lines
    assert ["plant-a", "to", "plant-b", "3/4", "48.9"] in lines
    assert ["plant-b", "to", "plant-a", "4/4", "—"] in lines


def test_an_outcome_is_that_of_the_requested_run() -> None:
    ended = [condition("Failed", "ProgramFailed", message="it raised")]
    one = JobStatus(document(conditions=ended, runId="1") | {"spec": {"runId": "1"}})
    assert one.outcome is not None
    assert outcome_exit_code(one.outcome) is ExitCode.PROGRAM
    other = JobStatus(document(conditions=ended, runId="1") | {"spec": {"runId": "2"}})
    assert other.outcome is None


@pytest.mark.parametrize(
    ("reason", "code", "words"),
    [
        ("EndedEarly", ExitCode.ENDED_EARLY, "digits ended before its stop condition was met"),
        ("Partial", ExitCode.PARTIAL, "digits ended with a model that lacks a worker's"),
        ("WorkersFailed", ExitCode.FAILED, "digits has failed"),
    ],
)
def test_an_unsuccessful_end_has_its_code_and_headline(
    reason: str, code: ExitCode, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = [condition("Failed", reason, message="worker 2 diverged")]
    outcome = JobStatus(document(conditions=ended)).outcome
    assert outcome is not None
    assert print_outcome("digits", outcome) is code
    assert f"{words}" in capsys.readouterr().err


def test_the_live_view_counts_down_and_shows_failures() -> None:
    now_s = [0.0]
    status = {"trainerStatus": {"progressPercentage": 50, "estimatedRemainingSeconds": 90}}
    job = JobStatus(document(state="Training", **status))
    terminal = Console(file=io.StringIO(), width=120, force_terminal=True)
    view = JobProgressView(job, terminal, clock=lambda: now_s[0], now=lambda: NOW)
    view.update(job, [{"reason": "PeerLost", "message": "w", "type": "Warning", "count": 3}])
    now_s[0] = 30.0
    text = shown(view.render(), width=120)
    assert "ETA 1:00" in text
    assert "50 %" in text
    assert "PeerLost  w  (x3)" in text
    view.connection_lost("no answer")
    assert "connection lost, retrying: no answer" in shown(view.render(), width=120)
    view.update(job, [])
    assert "connection lost" not in shown(view.render(), width=120)


def test_a_log_states_each_fact_once() -> None:
    console = Console(file=io.StringIO(), width=300, highlight=False)
    waiting = JobStatus(document(state="Waiting", conditions=[condition("Ready", "X", "False")]))
    view = JobProgressView(waiting, console, now=lambda: NOW)
    for _ in range(3):
        view.update(waiting, [{"reason": "R", "metadata": {"uid": "1"}}])
    view.connection_lost("gone")
    view.connection_lost("gone")
    output = console.file
    assert isinstance(output, io.StringIO)
    lines = output.getvalue().splitlines()
    assert [
        sum(words in line for line in lines) for words in ("Ready=False (X)", "Waiting, —", "R")
    ]
    assert len(lines) == 4


def test_changed_fields_are_named() -> None:
    before = smallest()
    after = changed(before, {"spec.trainer.stop": {"maxSteps": 7}, "spec.maxRestarts": 3})
    message = changed_fields(before, after, "spec.trainer")
    assert message == "spec.trainer.stop.maxSteps: 100 → 7"
    assert changed_fields(before, changed(before, {"spec.runId": "2"}), "spec.runId") == (
        "spec.runId: '1' → '2'"
    )
    assert changed_fields(None, after, "spec") == ""
    assert changed_fields({"spec": 1}, after, "spec") == ""


def test_without_its_packages_the_message_names_the_installation() -> None:
    code = (
        "import sys; sys.modules['urllib3'] = None;"
        "from dlion_cli.__main__ import main; sys.exit(main(['get']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == ExitCode.UNAVAILABLE
    assert "-py3-none-any.whl[cluster]'" in done.stderr


def test_help_of_the_clusters_commands_loads_neither_client_nor_tensorflow() -> None:
    commands = ["submit", "get", "watch", "logs", "fetch", "suspend", "resume", "delete", "trust"]
    code = (
        "import sys; from dlion_cli.__main__ import main;"
        f"codes = [main([c, '--help']) for c in {commands}];"
        "heavy = {'tensorflow', 'grpc', 'numpy', 'keras', 'kubernetes'} & set(sys.modules);"
        "sys.exit(f'{codes} {heavy}' if any(codes) or heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["get", "x", "-A"],
        ["submit", "f", "--wait", "--dry-run"],
        ["fetch", "x", "--all", "--site=a"],
        ["logs", "x", "-c", "keeper", "--group", "g"],
        ["logs", "x", "--tail", "-1"],
        ["delete"],
    ],
)
def test_conflicting_options_are_refused(arguments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "config"
    cluster = {"name": "c", "cluster": {"server": "https://127.0.0.1:9"}}
    text = yaml.safe_load(config(path, "a", a="x").read_text()) | {"clusters": [cluster]}
    path.write_text(yaml.safe_dump(text))
    assert main([*arguments, "--kubeconfig", str(path)]) == ExitCode.USAGE
