"""Test `dlion submit|get|watch|suspend|resume|delete|trust|preflight` against a real API server.

The API server has no nodes. The test writes the status through its subresource in the operator's
place. A manifest is created, unchanged or configured, with its program. A refused change names the
changed fields and what to do. Nothing is sent of an invalid file. Columns and documents equal those
of kubectl. watch ends with the outcome's exit code, also after a broken connection or a deletion.
wait ends with a condition of the current manifest. describe and events show problems, also without
the right to read pods. scale changes one number, unless another client was faster. revoke and
restore change one annotation. suspend, resume and delete are idempotent. Each kind of failure has
its message and exit code: a cluster without the definition, a user without rights, an unknown
token, a missing server.

Left out: logs and fetch, which need a node (test_cli_pods), and what an operator does.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import pytest
import yaml

import manifest_schema
from api_server import Jobs, jobs_of
from chart import CHART, Helm, entry, helm_program
from dlion_api.cluster_names import REVOKED_ANNOTATION
from dlion_api.errors import SpecError
from dlion_api.exit_codes import ExitCode
from dlion_api.names import SiteName
from dlion_api.spec import load_job
from dlion_cli.__main__ import main
from dlion_cli.cluster.client import connect
from dlion_cli.cluster.cluster_jobs import JobClient
from dlion_cli.cluster.connection_settings import ConnectionSettings
from dlion_cli.commands.cluster.scale import find_group
from dlion_operator.pki.authority import CertificateAuthority
from manifest_table import changed, smallest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from testbed.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.root]

CRD = "dlionjobs.dlion.dev"
NOW = "2026-01-31T12:00:00Z"
ROLE = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "Role",
    "metadata": {"name": "reader"},
    "rules": [
        {"apiGroups": ["dlion.dev"], "resources": ["dlionjobs"], "verbs": ["get", "list", "watch"]}
    ],
}


@dataclass
class Shell:
    """The command line with one cluster; `stdout` and `stderr` are of its last command."""

    kubeconfig: Path
    namespace: str
    folder: Path
    capture: pytest.CaptureFixture[str]
    stdout: str = ""
    stderr: str = ""

    def dlion(self, *arguments: str) -> int:
        """Run a command and return its exit code."""
        self.capture.readouterr()
        where = ["--kubeconfig", str(self.kubeconfig), "-n", self.namespace]
        code = main([*arguments, *where])
        self.stdout, self.stderr = self.capture.readouterr()
        return code

    def file(self, *documents: Any) -> str:
        """Write a manifest file with these documents."""
        path = self.folder / f"{uuid.uuid4().hex[:8]}.yaml"
        path.write_text(yaml.safe_dump_all(documents, sort_keys=False))
        return str(path)


@pytest.fixture(scope="module")
def bare(control_plane: Kubectl) -> Iterator[Kubectl]:
    """A new namespace in a cluster without the definition."""
    namespace = f"dlion-test-{uuid.uuid4().hex[:8]}"
    control_plane.run("create", "namespace", namespace)
    yield replace(control_plane, namespace=namespace)
    control_plane.run("delete", "namespace", namespace, "--wait=false", "--ignore-not-found")


@pytest.fixture(scope="module")
def kubectl(bare: Kubectl) -> Iterator[Kubectl]:
    """The same with the CRD."""
    bare.run("create", "-f", str(manifest_schema.CRD))
    try:
        bare.wait_until_known(CRD)
        yield bare
    finally:
        bare.run("delete", "crd", CRD, "--wait=false")


@pytest.fixture(scope="module")
def jobs(kubectl: Kubectl) -> Iterator[Jobs]:
    """The jobs there, as the operator writes them."""
    with jobs_of(kubectl) as made:
        made.wait_until_served()
        yield made


@pytest.fixture
def shell(bare: Kubectl, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(bare.kubeconfig, bare.namespace, tmp_path, capsys)


@pytest.fixture
def name(kubectl: Kubectl, jobs: Jobs) -> Iterator[str]:
    """A job's name; the job is removed at the end."""
    made = f"job-{uuid.uuid4().hex[:6]}"
    yield made
    kubectl.run("delete", "dlj", made, "--ignore-not-found", "--wait=false")


def manifest(name: str, **changes: Any) -> dict[str, Any]:
    return changed(
        smallest(), {"metadata.name": name, **{f"spec.{k}": v for k, v in changes.items()}}
    )


def condition(type_: str, status: str, reason: str, message: str = "") -> dict[str, Any]:
    return {
        "type": type_, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": NOW, "observedGeneration": 1,
    }  # fmt: skip


def status(state: str, *conditions: dict[str, Any], progress: int = 42) -> dict[str, Any]:
    return {
        "observedGeneration": 100,
        "state": state,
        "runId": "1",
        "trainingStartTime": "2026-01-31T12:00:00Z",
        "conditions": list(conditions),
        "sites": [
            {"name": "plant-a", "state": "Ready", "workers": 3, "readyWorkers": 2, "message": "m1"}
        ],
        "readySites": "1/2",
        "readyWorkers": "2/4",
        "stepsPerSecond": "3.5",
        "links": {"connected": 5, "expected": 6, "slowest": "plant-a plant-b"},
        "trainerStatus": {
            "progressPercentage": progress,
            "estimatedRemainingSeconds": 90,
            "metrics": [{"name": "loss", "value": "0.31"}, {"name": "accuracy", "value": "0.92"}],
        },
    }


TRAINING = status("Training", condition("Ready", "True", "Training", "all train"))
SUCCEEDED = status(
    "Succeeded",
    condition("Ready", "True", "Completed"),
    condition("Succeeded", "True", "Completed", "target reached"),
    progress=100,
)


def write_status(jobs: Jobs, name: str, status_: dict[str, Any]) -> None:
    """Write the status as the operator does."""
    answer = jobs.replace_status(name, jobs.get(name) | {"status": status_}, dry_run=False)
    assert answer.accepted, answer.message


def in_background(*steps: Callable[[], object], after_s: float = 1.0) -> threading.Thread:
    def work() -> None:
        for step in steps:
            time.sleep(after_s)
            step()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


# ---- before the kind is known, and without a cluster ---------------------------------------------


def test_without_the_definition_the_install_command_is_printed(shell: Shell) -> None:
    for command in (["get"], ["get", "x"], ["submit", shell.file(manifest("x"))], ["watch", "x"]):
        assert shell.dlion(*command) == ExitCode.UNAVAILABLE, command
        assert f"{CRD} is not installed" in shell.stderr
        assert "helm install" in shell.stderr


def test_a_missing_server_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = kubeconfig_file(tmp_path, "https://127.0.0.1:9", {"token": "x"})
    begun_s = time.monotonic()
    assert main(["get", "--kubeconfig", str(path)]) == ExitCode.UNAVAILABLE
    stderr = capsys.readouterr().err
    assert "https://127.0.0.1:9" in stderr
    assert "nothing listens there" in stderr
    assert "context 'it'" in stderr
    assert time.monotonic() - begun_s < 10


def kubeconfig_file(
    folder: Path, server: str, user: dict[str, Any], ca: str = "", namespace: str = "default"
) -> Path:
    cluster = {"server": server} | ({"certificate-authority-data": ca} if ca else {})
    document = {
        "apiVersion": "v1", "kind": "Config", "current-context": "it",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [
            {"name": "it", "context": {"cluster": "c", "user": "u", "namespace": namespace}}
        ],
    }  # fmt: skip
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(document))
    return path


# ---- submit --------------------------------------------------------------------------------------


def test_submit_creates_keeps_and_configures(shell: Shell, jobs: Jobs, name: str) -> None:
    file = shell.file(manifest(name))
    assert shell.dlion("submit", file) == 0
    assert shell.stdout == f"dlionjob.dlion.dev/{name} created\n"
    kept = jobs.get(name)
    assert {f["manager"] for f in kept["metadata"]["managedFields"]} == {"dlion-cli"}
    assert load_job(kept).spec == load_job(manifest(name)).spec
    versions = []
    for _ in range(2):  # the first time the API server adds a default
        assert shell.dlion("submit", file) == 0
        assert shell.stdout == f"dlionjob.dlion.dev/{name} unchanged\n"
        versions.append(jobs.get(name)["metadata"]["resourceVersion"])
    assert versions[0] == versions[1]
    assert shell.dlion("submit", file, "--set", "maxRestarts=3", "--set", "minSites=1.0") == 0
    assert shell.stdout == f"dlionjob.dlion.dev/{name} configured\n"
    assert jobs.get(name)["spec"]["maxRestarts"] == 3


def test_a_program_beside_the_manifest_is_sent_with_the_job(
    shell: Shell, jobs: Jobs, kubectl: Kubectl, name: str
) -> None:
    """It is also deleted with the job: the API server's owner reference shows it."""
    project = shell.folder / "project"
    assert main(["init", str(project)]) == 0
    file = str(project / "job.yaml")
    assert shell.dlion("submit", file, "--set", f"metadata.name={name}", "--dry-run") == 0
    assert not config_maps(kubectl, name)
    refused = ("--set", f"metadata.name={name}", "--set", "metadata.labels={a: '!'}")
    assert shell.dlion("submit", file, *refused) == ExitCode.SPEC
    assert "the API server rejects it" in shell.stderr
    assert not config_maps(kubectl, name)
    for verb in ("created", "unchanged", "unchanged"):
        assert shell.dlion("submit", file, "--set", f"metadata.name={name}") == 0
        assert shell.stdout == f"dlionjob.dlion.dev/{name} {verb}\n"
    job = jobs.get(name)
    (stored,) = config_maps(kubectl, name)
    key = job["spec"]["trainer"]["program"]["configMap"]
    assert key == {"name": stored["metadata"]["name"], "key": "program.py"}
    assert stored["data"] == {"program.py": (project / "program.py").read_text()}
    (owner,) = stored["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("DLionJob", job["metadata"]["uid"])


def config_maps(kubectl: Kubectl, job: str) -> list[dict[str, Any]]:
    listed = json.loads(kubectl.run("get", "configmap", "-o", "json"))["items"]
    return [one for one in listed if one["metadata"]["name"].startswith(f"{job}-program-")]


def test_a_dry_run_changes_nothing(shell: Shell, jobs: Jobs, name: str) -> None:
    file = shell.file(manifest(name))
    assert shell.dlion("submit", file, "--dry-run") == 0
    assert shell.stdout == f"dlionjob.dlion.dev/{name} created (server dry run)\n"
    assert shell.dlion("get", name) == ExitCode.UNAVAILABLE
    assert f"there is no DLionJob '{name}' here" in shell.stderr


def test_the_output_of_get_can_be_submitted_again(shell: Shell, jobs: Jobs, name: str) -> None:
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    write_status(jobs, name, TRAINING)
    assert shell.dlion("get", name, "-o", "yaml") == 0
    assert shell.dlion("submit", shell.file(yaml.safe_load(shell.stdout))) == 0
    assert shell.stdout == f"dlionjob.dlion.dev/{name} unchanged\n"


def test_nothing_is_sent_of_an_invalid_file(shell: Shell, jobs: Jobs, name: str) -> None:
    wrong = manifest(name, minSites=65)
    worse = changed(manifest("other"), {"spec.trainer.seeds": 1, "spec.maxRestarts": -1})
    assert shell.dlion("submit", shell.file(manifest(name), wrong, worse)) == ExitCode.SPEC
    assert "#2: " in shell.stderr
    assert "spec.minSites" in shell.stderr
    assert "#3: 2 problems" in shell.stderr
    assert all(re.search(rf"line \d+: spec.{f}", shell.stderr) for f in ("trainer.seeds", "max"))
    assert shell.dlion("get", name) == ExitCode.UNAVAILABLE
    assert shell.dlion("submit", str(shell.folder / "none.yaml")) == ExitCode.DATA


def test_a_refused_change_states_what_to_do(shell: Shell, jobs: Jobs, name: str) -> None:
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    other = changed(
        manifest(name), {"spec.trainer.optimizer": {"name": "sgd", "learningRate": 0.5}}
    )
    write_status(jobs, name, TRAINING)
    assert shell.dlion("submit", shell.file(other)) == ExitCode.SPEC
    assert "trainer may change only together with runId" in shell.stderr
    assert re.search(r"spec\.trainer\.optimizer\.learningRate: \S+ → 0\.5", shell.stderr)
    assert "--set runId=" in shell.stderr
    assert re.search(r"line \d+: spec\.trainer", shell.stderr)
    assert shell.dlion("submit", shell.file(other), "--set", "runId=2") == ExitCode.SPEC
    assert "runId may change only after the job has succeeded or failed" in shell.stderr
    write_status(jobs, name, SUCCEEDED)
    assert shell.dlion("submit", shell.file(other), "--set", "runId=2") == 0
    assert "configured" in shell.stdout


def test_an_ended_run_is_reported_as_ended(shell: Shell, jobs: Jobs, name: str) -> None:
    file = shell.file(manifest(name))
    assert shell.dlion("submit", file) == 0
    write_status(jobs, name, SUCCEEDED)
    assert shell.dlion("submit", file) == 0
    assert "has ended (Succeeded)" in shell.stderr


def test_fields_of_other_managers_are_not_taken_over(
    shell: Shell, kubectl: Kubectl, name: str
) -> None:
    kubectl.run(
        "apply", "--server-side", "--field-manager=other", "-f", "-",
        text=json.dumps(manifest(name, maxRestarts=2)),
    )  # fmt: skip
    file = shell.file(manifest(name, maxRestarts=3))
    assert shell.dlion("submit", file) == ExitCode.DENIED
    assert "spec.maxRestarts" in shell.stderr
    assert "other" in shell.stderr
    assert shell.dlion("submit", file, "--force-conflicts") == 0


def test_only_one_namespace_is_used(shell: Shell, name: str) -> None:
    elsewhere = changed(manifest(name), {"metadata.namespace": "elsewhere"})
    assert shell.dlion("submit", shell.file(elsewhere)) == ExitCode.SPEC
    assert "differs from the namespace of -n" in shell.stderr
    shell.namespace = "nowhere"
    assert shell.dlion("submit", shell.file(manifest(name))) == ExitCode.UNAVAILABLE
    assert "there is no namespace 'nowhere'" in shell.stderr


def test_several_documents_are_submitted_and_awaited(shell: Shell, jobs: Jobs, name: str) -> None:
    second = f"{name}-b"
    file = shell.file(manifest(name), manifest(second))
    failed = status("Failed", condition("Failed", "True", "ProgramFailed", "it raised"))
    operator = in_background(
        lambda: write_status(jobs, name, SUCCEEDED),
        lambda: write_status(jobs, second, failed),
        after_s=2,
    )
    code = shell.dlion("submit", file, "--wait", "--timeout", "30")
    operator.join()
    jobs.delete(second)
    assert code == ExitCode.PROGRAM
    assert f"{name} has succeeded: target reached" in shell.stdout
    assert "has failed (ProgramFailed): it raised" in shell.stderr


# ---- get -----------------------------------------------------------------------------------------


def test_get_shows_the_columns_of_kubectl(
    shell: Shell, kubectl: Kubectl, jobs: Jobs, name: str
) -> None:
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    write_status(jobs, name, TRAINING)
    assert shell.dlion("get") == 0
    header, *rows = shell.stdout.splitlines()
    by_kubectl = kubectl.run("get", "dlj").splitlines()[0].split()
    assert header.split() == by_kubectl
    row = next(row for row in rows if row.startswith(name))
    assert row.split()[:7] == [name, "Training", "42", "%", "1/2", "2/4", "3.5"]
    assert shell.dlion("get", "-o", "wide") == 0
    assert "accuracy" not in shell.stdout
    assert {"0.31", "0.92", "1:30"} <= set(shell.stdout.split())
    assert shell.dlion("get", "-A") == 0
    assert shell.namespace in shell.stdout
    assert shell.dlion("get", "-o", "name") == 0
    assert f"dlionjob.dlion.dev/{name}" in shell.stdout.splitlines()


def test_get_of_one_job_shows_sites_conditions_and_events(
    shell: Shell, kubectl: Kubectl, jobs: Jobs, name: str
) -> None:
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    assert shell.dlion("get", name) == 0
    assert "No operator has observed this job yet" in shell.stdout
    write_status(jobs, name, TRAINING)
    kubectl.apply(event(kubectl.namespace, name, "WorkersCreated", "3 workers\x1b[2J"))
    assert shell.dlion("get", name) == 0
    for words in ("plant-a", "2/3", "m1", "Ready", "all train", "WorkersCreated", "5/6, slowest"):
        assert words in shell.stdout, words
    assert "\x1b[2J" not in shell.stdout
    assert "No operator" not in shell.stdout
    assert shell.dlion("get", name, "-o", "json") == 0
    document = json.loads(shell.stdout)
    assert document["status"]["trainerStatus"]["metrics"][1]["value"] == "0.92"
    assert "managedFields" not in document["metadata"]


def event(namespace: str, name: str, reason: str, message: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "Event", "type": "Normal", "reason": reason,
        "metadata": {"name": f"{name}-{reason.lower()}"}, "message": message, "lastTimestamp": NOW,
        "involvedObject": {
            "apiVersion": "dlion.dev/v1alpha1", "kind": "DLionJob", "name": name,
            "namespace": namespace,
        },
    }  # fmt: skip


def test_no_jobs_are_not_an_error(shell: Shell, jobs: Jobs) -> None:
    shell.namespace = "default"
    assert shell.dlion("get") == 0
    assert "there are no DLionJobs in namespace default" in shell.stderr
    assert shell.dlion("get", "-o", "json") == 0
    assert json.loads(shell.stdout)["items"] == []


def test_several_contexts_are_joined(shell: Shell, jobs: Jobs, name: str) -> None:
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    write_status(jobs, name, SUCCEEDED)
    config = yaml.safe_load(shell.kubeconfig.read_text())
    (entry,) = config["contexts"]
    whose = {key: entry["context"][key] for key in ("cluster", "user")}
    config["clusters"].append({"name": "away", "cluster": {"server": "https://127.0.0.1:9"}})
    config["contexts"] = [
        {"name": "here", "context": whose | {"namespace": shell.namespace}},
        {"name": "elsewhere", "context": whose | {"namespace": "default"}},
        {"name": "away", "context": whose | {"cluster": "away"}},
    ]
    path = shell.folder / "contexts"
    path.write_text(yaml.safe_dump(config))
    command = ["get", name, "--contexts", "away,elsewhere,here", "--kubeconfig", str(path)]
    shell.capture.readouterr()
    assert main(command) == ExitCode.UNAVAILABLE
    printed = shell.capture.readouterr()
    assert [row.split()[:3] for row in printed.out.splitlines()[1:]] == [
        ["here", name, "Succeeded"]
    ]
    assert "context away: no API server answers" in printed.err
    assert f"context elsewhere: there is no DLionJob '{name}' here" in printed.err
    assert main([*command, "-o", "json"]) == ExitCode.UNAVAILABLE
    listed = json.loads(shell.capture.readouterr().out)
    assert [len(each["items"]) for each in listed] == [0, 0, 1]
    watch = ["watch", name, "--contexts", "here", "--timeout", "30", "--kubeconfig", str(path)]
    assert main(watch) == 0


# ---- watch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "code"),
    [("DeadlineExceeded", ExitCode.DEADLINE), ("InvalidSpec", ExitCode.SPEC),
     ("RestartsExceeded", ExitCode.FAILED)],
)  # fmt: skip
def test_watch_ends_with_the_outcome(
    shell: Shell, jobs: Jobs, name: str, reason: str, code: ExitCode
) -> None:
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    failed = status("Failed", condition("Failed", "True", reason, "why it did"))
    operator = in_background(
        lambda: write_status(jobs, name, TRAINING), lambda: write_status(jobs, name, failed)
    )
    ended = shell.dlion("watch", name, "--timeout", "30")
    operator.join()
    assert ended == code
    assert "Ready=True (Training): all train" in shell.stdout
    assert (
        "Training, 42 %, ETA 1:30, sites 1/2, workers 2/4, 3.5 steps/s, loss 0.31" in shell.stdout
    )
    assert f"has failed ({reason}): why it did" in shell.stderr


def test_watch_as_json_prints_a_document_at_each_change(
    shell: Shell, jobs: Jobs, name: str
) -> None:
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    operator = in_background(
        lambda: write_status(jobs, name, TRAINING), lambda: write_status(jobs, name, SUCCEEDED)
    )
    assert shell.dlion("watch", name, "-o", "json", "--timeout", "30") == 0
    operator.join()
    states = [json.loads(line)["status"].get("state") for line in shell.stdout.splitlines()]
    assert states == ["", "Training", "Succeeded"]


def test_watch_times_out_and_reports_a_deletion(shell: Shell, jobs: Jobs, name: str) -> None:
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    assert shell.dlion("watch", name, "--timeout", "2") == ExitCode.DEADLINE
    assert "The job continues" in shell.stderr
    operator = in_background(lambda: jobs.delete(name))
    assert shell.dlion("watch", name, "--timeout", "30") == ExitCode.UNAVAILABLE
    operator.join()
    assert "was deleted during the watch" in shell.stderr


def test_ctrl_c_leaves_the_job_running(shell: Shell, jobs: Jobs, name: str) -> None:
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    write_status(jobs, name, TRAINING)
    command = [sys.executable, "-m", "dlion_cli", "watch", name, "-n", shell.namespace]
    with subprocess.Popen(
        [*command, "--kubeconfig", str(shell.kubeconfig)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as watching:  # fmt: skip
        assert watching.stdout is not None
        assert watching.stderr is not None
        assert "Ready=True" in watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        stderr = watching.stderr.read()
    assert watching.returncode == ExitCode.INTERRUPTED
    assert "The job continues" in stderr
    assert jobs.get(name)["spec"]["suspend"] is False


def test_watch_continues_after_a_broken_connection(shell: Shell, jobs: Jobs, name: str) -> None:
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    config = yaml.safe_load(shell.kubeconfig.read_text())
    cluster = config["clusters"][0]["cluster"]
    address = urlsplit(cluster["server"])
    assert address.hostname is not None
    with Relay((address.hostname, address.port or 443)) as relay:
        cluster |= {"server": relay.address, "tls-server-name": address.hostname}
        (shell.folder / "relayed").write_text(yaml.safe_dump(config))
        relayed = replace(shell, kubeconfig=shell.folder / "relayed")
        operator = in_background(
            relay.cut,
            lambda: write_status(jobs, name, TRAINING),
            relay.mend,
            lambda: time.sleep(4),  # longer than the pauses
            lambda: write_status(jobs, name, SUCCEEDED),
        )
        code = relayed.dlion("watch", name, "--timeout", "40")
        operator.join()
    assert code == 0
    assert relayed.stdout.count("connection lost, retrying") == 1
    assert "Training, 42 %" in relayed.stdout
    assert "has succeeded" in relayed.stdout


class Relay:
    """A connection to an API server that can be cut, and restored at the same address."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = self._listener.getsockname()[1]
        self.address = f"https://127.0.0.1:{self._port}"
        self._serve()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    def cut(self) -> None:
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._sockets.clear()

    def mend(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._serve()

    def _serve(self) -> None:
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=_pump, args=ends, daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while content := source.recv(65536):
            sink.sendall(content)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)


# ---- describe, events, wait, scale ---------------------------------------------------------------


def test_describe_begins_with_the_problems(
    shell: Shell, kubectl: Kubectl, jobs: Jobs, name: str
) -> None:
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    degraded = status(
        "Degraded", condition("Ready", "True", "PeersLost", "2 of 3 workers train here"),
        condition("Degraded", "True", "PeersLost", "2 of 3 workers train here"),
    )  # fmt: skip
    write_status(jobs, name, degraded)
    kubectl.apply(event(kubectl.namespace, name, "WorkersCreated", "3 workers"))
    assert shell.dlion("describe", name) == 0
    lines = shell.stdout.splitlines()
    assert lines[0] == "PROBLEMS"
    assert lines[1].split()[:2] == ["warning", f"dlionjob/{name}:"]
    assert "2 of 3 workers train here" in lines[1]
    assert "has no pods at this site" in shell.stdout
    assert "WorkersCreated" in shell.stdout
    assert shell.dlion("events", name, "-o", "json") == 0
    assert [each["reason"] for each in json.loads(shell.stdout)] == ["WorkersCreated"]
    assert shell.dlion("events", name, "--types", "Warning") == 0
    assert "no such events" in shell.stderr


def test_events_are_watched_until_ctrl_c(
    shell: Shell, kubectl: Kubectl, jobs: Jobs, name: str
) -> None:
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    kubectl.apply(event(kubectl.namespace, name, "WorkersCreated", "3 workers"))
    command = [sys.executable, "-m", "dlion_cli", "events", name, "-w", "-n", shell.namespace]
    with subprocess.Popen(
        [*command, "--kubeconfig", str(shell.kubeconfig)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as watching:  # fmt: skip
        assert watching.stdout is not None
        assert "LAST SEEN" in watching.stdout.readline()
        assert "WorkersCreated" in watching.stdout.readline()
        kubectl.apply(event(kubectl.namespace, f"{name}-other", "Unrelated", "of another job"))
        kubectl.apply(event(kubectl.namespace, name, "Training", "all train"))
        assert "all train" in watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        rest, errors = watching.communicate()
    assert (watching.returncode, rest, errors) == (ExitCode.INTERRUPTED, "", "")


def test_wait_ends_with_the_condition_of_the_current_manifest(
    shell: Shell, jobs: Jobs, name: str
) -> None:
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    write_status(jobs, name, TRAINING)
    assert shell.dlion("wait", name, "--for=training", "--timeout", "30") == 0
    assert shell.stdout == f"dlionjob.dlion.dev/{name} condition met\n"
    assert shell.dlion("wait", name, "--for=condition=Ready", "--timeout", "30") == 0
    assert shell.dlion("submit", shell.file(manifest(name, maxRestarts=3))) == 0
    # The condition is of the earlier manifest.
    assert shell.dlion("wait", name, "--for=condition=Ready", "--timeout", "2") == ExitCode.DEADLINE
    operator = in_background(lambda: write_status(jobs, name, SUCCEEDED))
    assert shell.dlion("wait", name, "--timeout", "30") == 0
    operator.join()
    operator = in_background(lambda: jobs.delete(name))
    assert shell.dlion("wait", name, "--for=delete", "--timeout", "30") == 0
    operator.join()
    assert shell.dlion("wait", name, "--for=delete") == 0
    assert shell.dlion("wait", name) == ExitCode.UNAVAILABLE


def test_scale_changes_one_number_while_workers_train(shell: Shell, jobs: Jobs, name: str) -> None:
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    write_status(jobs, name, TRAINING)
    before = jobs.get(name)["spec"]
    site = before["sites"][0]
    group = site["groups"][0]
    command = ["scale", name, "--site", site["name"], "--group", group["name"], "--workers"]
    wanted = str(group["workers"] + 2)
    assert shell.dlion(*command, wanted) == 0
    assert f"{site['name']}/{group['name']} {group['workers']} → {wanted}" in shell.stdout
    after = jobs.get(name)["spec"]
    assert after["sites"][0]["groups"][0]["workers"] == group["workers"] + 2
    after["sites"][0]["groups"][0]["workers"] = group["workers"]
    assert after == before
    assert shell.dlion(*command, wanted) == 0
    assert "unchanged" in shell.stdout
    assert shell.dlion("submit", shell.file(manifest(name))) == ExitCode.DENIED
    assert "workers" in shell.stderr
    edited = manifest(name)
    edited["spec"]["sites"][0]["groups"][0]["workers"] = group["workers"] + 2
    assert shell.dlion("submit", shell.file(edited)) == 0


def test_scale_is_refused_after_a_concurrent_change(shell: Shell, jobs: Jobs, name: str) -> None:
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    stored = jobs.get(name)
    site = stored["spec"]["sites"][0]
    place = find_group(stored, site["name"], site["groups"][0]["name"])
    client = connect(
        ConnectionSettings(kubeconfig=str(shell.kubeconfig), namespace=shell.namespace)
    )
    with contextlib.closing(client):
        stale = replace(place, workers=7)
        for dry_run in (True, False):
            with pytest.raises(SpecError):
                JobClient(client).scale(name, stale.patch(9), dry_run=dry_run)
        elsewhere = replace(place, site="plant-x")
        with pytest.raises(SpecError):
            JobClient(client).scale(name, elsewhere.patch(9), dry_run=False)
        JobClient(client).scale(name, place.patch(9), dry_run=True)
    assert jobs.get(name)["spec"] == stored["spec"]


# ---- trust revoke, restore -----------------------------------------------------------------------


def revoked_in(jobs: Jobs, name: str) -> Any:
    annotations = jobs.get(name)["metadata"].get("annotations") or {}
    return (
        json.loads(annotations[REVOKED_ANNOTATION]) if REVOKED_ANNOTATION in annotations else None
    )


def test_revoke_and_restore_are_idempotent_and_change_nothing_else(
    shell: Shell, jobs: Jobs, name: str
) -> None:
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    write_status(jobs, name, TRAINING)
    spec = jobs.get(name)["spec"]
    site, group = spec["sites"][0]["name"], spec["sites"][0]["groups"][0]["name"]
    worker = f"{site}/{group}-0"
    assert shell.dlion("trust", "revoke", name, worker, "--reason", "stolen") == 0
    assert shell.stdout == f"{name}: {worker} is revoked\n"
    assert revoked_in(jobs, name) == [{"name": worker, "reason": "stolen"}]
    assert shell.dlion("trust", "revoke", name, worker, "--reason", "stolen") == 0
    assert "nothing changed" in shell.stdout
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    assert revoked_in(jobs, name) == [{"name": worker, "reason": "stolen"}]
    assert jobs.get(name)["spec"] == spec
    assert shell.dlion("trust", "restore", name, worker) == 0
    assert shell.stdout == f"{name}: {worker} is trusted again\n"
    assert revoked_in(jobs, name) is None
    assert shell.dlion("trust", "restore", name, worker) == 0
    assert "nothing changed" in shell.stdout


def test_a_lifted_quarantine_is_not_repeated_by_the_operator(
    shell: Shell, jobs: Jobs, name: str
) -> None:
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    site = jobs.get(name)["spec"]["sites"][0]
    worker = f"{site['name']}/{site['groups'][0]['name']}-0"
    quarantine = {"name": worker, "by": site["name"], "effective": True, "automatic": True}
    write_status(jobs, name, TRAINING | {"revoked": [quarantine]})
    assert shell.dlion("trust", "restore", name, worker) == 0
    assert revoked_in(jobs, name) == [{"name": worker, "trusted": True}]


def test_a_revocation_of_none_of_all_or_after_the_end_is_refused(
    shell: Shell, jobs: Jobs, name: str
) -> None:
    document = manifest(name)
    document["spec"]["sites"] = [{"name": "plant-a", "groups": [{"name": "small", "workers": 2}]}]
    assert shell.dlion("submit", shell.file(document)) == 0
    for target in ("plant-x", "plant-a/small-2", "plant-a/", "../plant-a", "small-0", "\x1b[2J"):
        assert shell.dlion("trust", "revoke", name, target) == ExitCode.SPEC
        assert "the manifest has no such name" in shell.stderr
        assert "\x1b" not in shell.stderr
    assert shell.dlion("trust", "revoke", name, "plant-a") == ExitCode.SPEC
    assert "no worker of the job would be left" in shell.stderr
    assert shell.dlion("trust", "revoke", name, "plant-a/small-0", "--reason", "x" * 201) == 65
    assert shell.dlion("trust", "revoke", name, "plant-a/small-0") == 0
    assert shell.dlion("trust", "revoke", name, "plant-a/small-1") == ExitCode.SPEC
    assert revoked_in(jobs, name) == [{"name": "plant-a/small-0"}]
    assert shell.dlion("trust", "revoke", f"{name}-x", "plant-a") == ExitCode.UNAVAILABLE
    write_status(jobs, name, SUCCEEDED)
    assert shell.dlion("trust", "revoke", name, "plant-a/small-0") == ExitCode.SPEC
    assert "has ended" in shell.stderr


# ---- suspend, resume, delete ---------------------------------------------------------------------


def test_suspend_and_resume_are_idempotent(shell: Shell, jobs: Jobs, name: str) -> None:
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    write_status(jobs, name, TRAINING)
    assert shell.dlion("suspend", name) == 0
    assert jobs.get(name)["spec"]["suspend"] is True
    version = jobs.get(name)["metadata"]["resourceVersion"]
    assert shell.dlion("suspend", name) == 0
    assert "already suspended" in shell.stdout
    assert jobs.get(name)["metadata"]["resourceVersion"] == version
    suspended = status("Suspended", condition("Suspended", "True", "Suspended"))
    operator = in_background(lambda: write_status(jobs, name, suspended))
    assert shell.dlion("suspend", name, "--wait", "--timeout", "30") == 0
    operator.join()
    assert shell.dlion("resume", name, "--wait", "--timeout", "1") == ExitCode.DEADLINE
    assert jobs.get(name)["spec"]["suspend"] is False
    write_status(jobs, name, TRAINING)
    assert shell.dlion("resume", name, "--wait", "--timeout", "30") == 0
    write_status(jobs, name, SUCCEEDED)
    assert shell.dlion("suspend", name) == 0
    assert "its run has ended" in shell.stdout
    assert jobs.get(name)["spec"]["suspend"] is False


def test_delete_needs_a_confirmation_and_waits(
    shell: Shell, jobs: Jobs, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert shell.dlion("delete", name) == ExitCode.USAGE
    assert "--yes" in shell.stderr
    assert shell.dlion("delete", name, "--yes", "--timeout", "60") == 0
    assert shell.stdout == f"dlionjob.dlion.dev/{name} deleted\n"
    assert shell.dlion("get", name) == ExitCode.UNAVAILABLE
    assert shell.dlion("delete", name, "--yes") == ExitCode.UNAVAILABLE
    assert shell.dlion("delete", name, "--yes", "--ignore-not-found") == 0


def test_a_blocked_deletion_names_the_finalizer(
    shell: Shell, kubectl: Kubectl, jobs: Jobs, name: str
) -> None:
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    kubectl.run("patch", "dlj", name, "--type=merge", "-p", finalizers(["example.com/slow"]))
    assert shell.dlion("delete", name, "--yes", "--timeout", "2") == ExitCode.DEADLINE
    assert "example.com/slow" in shell.stderr
    kubectl.run("patch", "dlj", name, "--type=merge", "-p", finalizers([]))


def finalizers(names: list[str]) -> str:
    return json.dumps({"metadata": {"finalizers": names}})


# ---- rights --------------------------------------------------------------------------------------


@pytest.fixture
def as_reader(
    kubectl: Kubectl, shell: Shell, tmp_path: Path, request: pytest.FixtureRequest
) -> Shell:
    """The command line of a user who may only read jobs."""
    account = f"reader-{uuid.uuid4().hex[:6]}"
    kubectl.run("create", "serviceaccount", account)
    kubectl.apply(ROLE)
    subject = f"--serviceaccount={kubectl.namespace}:{account}"
    kubectl.run("create", "rolebinding", account, "--role=reader", subject)
    token = kubectl.run("create", "token", account).strip()
    admin = yaml.safe_load(kubectl.kubeconfig.read_text())["clusters"][0]["cluster"]
    ca = str(admin.get("certificate-authority-data", ""))
    path = kubeconfig_file(tmp_path, admin["server"], {"token": token}, ca, kubectl.namespace)
    return replace(shell, kubeconfig=path)


def test_a_missing_right_is_reported(as_reader: Shell, jobs: Jobs, name: str) -> None:
    assert jobs.create(manifest(name), dry_run=False).accepted
    assert as_reader.dlion("get", name) == 0  # events are left out silently
    assert as_reader.dlion("suspend", name) == ExitCode.DENIED
    assert "may not patch dlionjobs.dlion.dev" in as_reader.stderr
    assert "kubectl create role NAME --verb=patch" in as_reader.stderr
    assert as_reader.dlion("submit", as_reader.file(manifest(name))) == ExitCode.DENIED
    assert as_reader.dlion("delete", name, "--yes") == ExitCode.DENIED
    assert "may not delete" in as_reader.stderr
    assert as_reader.dlion("get", "-A") == ExitCode.DENIED
    assert "clusterrole" in as_reader.stderr
    assert as_reader.dlion("describe", name) == 0
    assert "without pods: user " in as_reader.stdout
    assert "without events: user " in as_reader.stdout
    assert as_reader.dlion("events", name) == ExitCode.DENIED
    assert as_reader.dlion("top", name) == ExitCode.DENIED
    assert as_reader.dlion("logs", name) == ExitCode.DENIED
    assert "may not list pods" in as_reader.stderr


def test_options_of_the_connection_choose_server_credentials_and_user(
    shell: Shell, as_reader: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    admin = yaml.safe_load(shell.kubeconfig.read_text())
    reader = yaml.safe_load(as_reader.kubeconfig.read_text())
    server, token = admin["clusters"][0]["cluster"]["server"], reader["users"][0]["user"]["token"]
    with_token = ["--token", token, "--request-timeout=30s"]
    assert shell.dlion("get", *with_token) == 0  # the admin's certificate takes precedence
    assert shell.dlion("get", "-A", *with_token) == ExitCode.DENIED
    assert shell.dlion("get", "--as", "jane") == ExitCode.DENIED
    assert "user 'jane' may not list dlionjobs.dlion.dev" in shell.stderr
    assert shell.dlion("get", "--as", "jane", "--as-group", "system:masters") == 0
    assert as_reader.dlion("get", "--as", "jane") == ExitCode.DENIED
    assert "may not act as user 'jane' (--as, 403)" in as_reader.stderr
    authority = as_reader.folder / "ca.pem"
    authority.write_bytes(
        base64.b64decode(admin["clusters"][0]["cluster"]["certificate-authority-data"])
    )
    alone = ["-s", server, "--token", token, "-n", shell.namespace]
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", "/nowhere")
        assert main(["get", *alone, "--certificate-authority", str(authority)]) == 0
        assert main([*alone, "get", "--insecure-skip-tls-verify"]) == 0
        assert main(["get", *alone]) == ExitCode.UNAVAILABLE
    assert "--certificate-authority" in capsys.readouterr().err


def test_an_unknown_token_is_reported(as_reader: Shell) -> None:
    text = as_reader.kubeconfig.read_text()
    as_reader.kubeconfig.write_text(re.sub(r"token: .*", "token: nonsense", text))
    assert as_reader.dlion("get") == ExitCode.DENIED
    assert "rejects your credentials" in as_reader.stderr


def test_an_exec_plugin_authenticates_the_user(as_reader: Shell, jobs: Jobs) -> None:
    config = yaml.safe_load(as_reader.kubeconfig.read_text())
    version = "client.authentication.k8s.io/v1"
    token = config["users"][0]["user"].pop("token")
    credential = {"apiVersion": version, "kind": "ExecCredential", "status": {"token": token}}
    config["users"][0]["user"]["exec"] = {
        "apiVersion": version, "command": "echo", "args": [json.dumps(credential)],
        "interactiveMode": "Never",
    }  # fmt: skip
    as_reader.kubeconfig.write_text(yaml.safe_dump(config))
    assert as_reader.dlion("get") == 0
    config["users"][0]["user"]["exec"] |= {"command": "false"}
    as_reader.kubeconfig.write_text(yaml.safe_dump(config))
    assert as_reader.dlion("get") == ExitCode.DATA
    assert "exec: process returned 1" in as_reader.stderr


def test_trust_show_needs_one_right(as_reader: Shell, kubectl: Kubectl, jobs: Jobs) -> None:
    bundle = CertificateAuthority(SiteName("plant-a")).bundle_pem.decode()
    kubectl.apply({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "dlion-authority"},
        "data": {"ca.crt": bundle},
    })  # fmt: skip
    assert as_reader.dlion("trust", "show") == ExitCode.DENIED
    assert "may not get configmaps" in as_reader.stderr
    rule = ["--verb=get", "--resource=configmaps", "--resource-name=dlion-authority"]
    kubectl.run("create", "role", "trust", *rule)
    all_accounts = f"--group=system:serviceaccounts:{kubectl.namespace}"
    kubectl.run("create", "rolebinding", "trust", "--role=trust", all_accounts)
    deadline_s = time.monotonic() + 30
    while as_reader.dlion("trust", "show") == ExitCode.DENIED:  # until the API server applies it
        assert time.monotonic() < deadline_s, as_reader.stderr
    (entry,) = yaml.safe_load(as_reader.stdout)["sites"]
    assert entry["name"] == "plant-a"
    assert entry["bundle"] == bundle
    assert as_reader.dlion("trust", "show", "--authority", "other") == ExitCode.DENIED


def test_preflight_checks_what_an_api_server_reports(
    shell: Shell, kubectl: Kubectl, jobs: Jobs, tmp_path: Path
) -> None:
    """First check a cluster with only the kind, then one with the chart and no node."""
    program = helm_program()
    assert program is not None
    helm = Helm(program, tmp_path, kubectl)
    listed = {"sites": [entry(f"plant-{x}", address=f"127.0.0.1:3044{x}") for x in "12"]}
    context = str(yaml.safe_load(shell.kubeconfig.read_text())["current-context"])
    command = ["preflight", shell.file(listed), "--context", context, "-o", "json"]

    def found() -> dict[str, dict[str, Any]]:
        assert shell.dlion(*command) == ExitCode.UNAVAILABLE
        return {each["check"]: each for each in json.loads(shell.stdout)["checks"]}

    before = found()
    assert before["definition"]["outcome"] == "ok", before["definition"]
    assert "there is no operator in namespace" in before["operator"]["observed"]
    assert before["clock"]["outcome"] == "ok"
    figures = before["clock"]["figures"]
    assert figures["clock_ahead_at_least_s"] <= 0 <= figures["clock_ahead_at_most_s"]
    service = {"type": "NodePort", "nodePort": 30441}
    values = {"site": {"name": "plant-1"}, "federation": {"service": service}, **listed}
    helm.run(
        "install", "dlion", str(CHART), "-n", kubectl.namespace, "--set", "crds.enabled=false",
        values=values,
    )  # fmt: skip
    try:
        after = found()
    finally:
        helm.run("uninstall", "dlion", "-n", kubectl.namespace)
    assert "dlion-operator is not ready" in after["operator"]["observed"]
    assert [after[name]["outcome"] for name in ("service", "list", "trust")] == ["ok"] * 3
    assert after["streams"]["outcome"] == "unknown"


def test_jobs_without_pods_have_neither_logs_nor_results(
    shell: Shell, jobs: Jobs, name: str
) -> None:
    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    assert shell.dlion("logs", name) == ExitCode.UNAVAILABLE
    assert "has no pods of workers at this site" in shell.stderr
    assert shell.dlion("fetch", name) == ExitCode.UNAVAILABLE
    assert "has no keeper pod here" in shell.stderr


def test_names_are_completed(shell: Shell, jobs: Jobs, name: str) -> None:
    from click.shell_completion import ShellComplete

    from dlion_cli.command_line import dlion

    assert shell.dlion("submit", shell.file(manifest(name))) == 0
    arguments = ["watch", "-n", shell.namespace, "--kubeconfig", str(shell.kubeconfig)]
    found = ShellComplete(dlion, {}, "dlion", "_DLION_COMPLETE").get_completions(
        arguments, name[:5]
    )
    assert name in [item.value for item in found]
