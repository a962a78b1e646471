"""Test `dlion logs`, `fetch`, `describe` and `top` with real pods, labelled as by the operator.

logs prints the lines of all workers with their names, or of one group or worker, and the last lines
of each. -f continues across a restarted container and a late worker, shows no line twice, and ends
with the run. A container that has not started is reported. fetch gets a tar stream through exec
completely, in many chunks, and checks it. It reports the errors of the command in the pod, and a
container without that command. A broken fetch keeps the existing files. A signed model is verified
by the authority in the cluster. describe finds each cause in the messages of scheduler, kubelet and
Job controller. top reads metrics of a pod through the API server's proxy.

Left out: the keeper itself. In place of Python a shell script sends what the real `pack` has
written; other tests cover the project's image and its keeper.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import threading
import time
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

import manifest_schema
from api_server import jobs_of
from dlion_api import cluster_names as names
from dlion_api.errors import UnavailableError
from dlion_api.exit_codes import ExitCode
from dlion_api.names import JobKey, KeeperIdentity, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.provenance import (
    PROVENANCE_FILE,
    Evidence,
    ModelProvenance,
    ProvenanceStatement,
    StatedRun,
    WorkerUpdates,
    stated_digests,
)
from dlion_cli.__main__ import main
from dlion_operator.pki.authority import CertificateAuthority
from dlion_worker.artifact_server.pack import pack
from dlion_worker.artifact_server.provenance_signer import ProvenanceSigner
from dlion_worker.artifact_server.workers import RevokedWorkers
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey
from manifest_table import changed, smallest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.root]

JOB = "podded"
MODEL = os.urandom(500_000).replace(b"X", b"Y")
STATUS = {"observedGeneration": 1, "state": "Training", "runId": "1"}
ENDED = STATUS | {
    "state": "Succeeded",
    "conditions": [
        {"type": "Succeeded", "status": "True", "reason": "Completed",
         "lastTransitionTime": "2026-01-31T12:00:00Z"}
    ],
}  # fmt: skip


@pytest.fixture
def job(cluster: Kubectl) -> Iterator[Kubectl]:
    """A job of run 1 in the cluster."""
    had = "dlionjobs.dlion.dev" in cluster.run("get", "crd", "-o", "name")
    if not had:
        cluster.run("create", "-f", str(manifest_schema.CRD))
    _submit(cluster)
    yield cluster
    if not had:
        cluster.run("delete", "crd", "dlionjobs.dlion.dev")


def _submit(cluster: Kubectl) -> None:
    manifest = changed(smallest(), {"metadata.name": JOB})
    deadline_s = time.monotonic() + 30
    while True:
        try:
            cluster.apply(manifest)
        except UnavailableError:  # the API server serves a new kind after a delay
            assert time.monotonic() < deadline_s
            time.sleep(0.2)
        else:
            return


def dlion(kubectl: Kubectl, *arguments: str) -> int:
    where = ["--kubeconfig", str(kubectl.kubeconfig), "-n", kubectl.namespace]
    return main([*arguments, *where])


def pod(image: str, component: str, script: str, **labels: str) -> dict[str, Any]:
    container = names.KEEPER_CONTAINER if component == names.KEEPER else names.TRAINER_CONTAINER
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{component}-{uuid.uuid4().hex[:6]}",
            "labels": {
                names.JOB_LABEL: JOB, names.RUN_LABEL: "1", names.COMPONENT_LABEL: component,
                names.SITE_LABEL: "plant-a", **labels,
            },
        },
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "restartPolicy": "OnFailure",
            "containers": [
                {"name": container, "image": image, "command": ["/bin/sh", "-c", script]}
            ],
        },
    }  # fmt: skip


def worker(image: str, group: str, index: int, script: str) -> dict[str, Any]:
    labels = {names.GROUP_LABEL: group, names.INDEX_LABEL: str(index)}
    return pod(image, names.WORKER, script, **labels)


def wait_for_phase(kubectl: Kubectl, phase: str, *pods: dict[str, Any]) -> None:
    for each in pods:
        path = f"pod/{each['metadata']['name']}"
        kubectl.wait(f"--for=jsonpath={{.status.phase}}={phase}", path)


def write_status(kubectl: Kubectl, status: dict[str, Any]) -> None:
    with jobs_of(kubectl) as jobs:
        answer = jobs.replace_status(JOB, jobs.get(JOB) | {"status": status}, dry_run=False)
    assert answer.accepted, answer.message


def test_logs_of_all_workers_and_of_some(
    job: Kubectl, busybox: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pods = [
        worker(busybox, "small", 0, "echo a1; echo a2"),
        worker(busybox, "small", 1, "echo b1; printf 'b2\\033[2J'"),
        worker(busybox, "large", 0, "echo c1"),
    ]
    job.apply(*pods)
    wait_for_phase(job, "Succeeded", *pods)
    assert dlion(job, "logs", JOB) == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [
        "large-0 | c1", "small-0 | a1", "small-0 | a2", "small-1 | b1", "small-1 | b2·[2J"
    ]  # fmt: skip
    assert dlion(job, "logs", JOB, "--group", "small", "--worker", "0", "--tail", "1") == 0
    assert capsys.readouterr().out == "small-0 | a2\n"
    assert dlion(job, "logs", JOB, "--group", "large", "--timestamps") == 0
    assert re.fullmatch(r"large-0 \| \d{4}-\S+Z c1\n", capsys.readouterr().out)
    assert dlion(job, "logs", JOB, "--group", "none") == ExitCode.UNAVAILABLE
    assert "no pods of workers of group none" in capsys.readouterr().err


def test_following_survives_restarts_and_includes_late_workers(
    job: Kubectl, busybox: str, capsys: pytest.CaptureFixture[str]
) -> None:
    restarts = (
        "if [ -e /state/once ]; then for i in 4 5 6; do echo line $i; sleep 1; done; sleep 600; fi;"
        "for i in 1 2 3; do echo line $i; sleep 1; done; touch /state/once; exit 1"
    )
    first = worker(busybox, "small", 0, restarts)
    first["spec"]["volumes"] = [{"name": "state", "emptyDir": {}}]
    first["spec"]["containers"][0]["volumeMounts"] = [{"name": "state", "mountPath": "/state"}]
    job.apply(first)
    write_status(job, STATUS)
    ended: list[int] = []
    following = threading.Thread(target=lambda: ended.append(dlion(job, "logs", JOB, "-f")))
    following.start()
    wait_for_phase(job, "Running", first)
    late = worker(busybox, "small", 1, "echo late; sleep 600")
    job.apply(late)
    wait_for_phase(job, "Running", late)
    printed, give_up_s = "", time.monotonic() + 90
    while "line 6" not in printed:  # after the restart's back-off of ten seconds
        assert time.monotonic() < give_up_s, printed
        time.sleep(0.5)
        printed += capsys.readouterr().out
    write_status(job, ENDED)
    following.join(timeout=30)
    assert ended == [0]
    lines = (printed + capsys.readouterr().out).splitlines()
    of_first = [line for line in lines if line.startswith("small-0")]
    assert of_first == [f"small-0 | line {i}" for i in range(1, 7)]
    assert lines.count("small-1 | late") == 1


def test_a_container_that_has_not_started_is_reported(
    job: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    job.apply(worker("dlion.test/none:0", "small", 0, "true"))
    deadline_s = time.monotonic() + 30
    while "is waiting to start" not in capsys.readouterr().err:
        assert time.monotonic() < deadline_s
        assert dlion(job, "logs", JOB) == 0
        time.sleep(0.5)


# ---- fetch ---------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The files of a keeper."""
    folder = tmp_path / "kept" / "1" / "models" / "plant-a"
    folder.mkdir(parents=True)
    (folder / "model.keras").write_bytes(MODEL)
    (folder / "model.json").write_text('{"model": "averaged"}')
    return tmp_path / "kept"


def keeper(kubectl: Kubectl, image: str, stream: bytes, script: str) -> None:
    """A keeper whose `python` is that script; the stream is in /bin2/stream."""
    files = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "python"},
        "data": {"python": f"#!/bin/sh\n{script}\n"},
        "binaryData": {"stream": base64.b64encode(stream).decode()},
    }
    made = pod(image, names.KEEPER, "sleep 600")
    container = made["spec"]["containers"][0]
    container["env"] = [{"name": "PATH", "value": "/bin2:/bin"}]
    container["volumeMounts"] = [{"name": "python", "mountPath": "/bin2"}]
    made["spec"]["volumes"] = [
        {"name": "python", "configMap": {"name": "python", "defaultMode": 0o755}}
    ]
    kubectl.run("create", "-f", "-", text=json.dumps(files))
    kubectl.run("create", "-f", "-", text=json.dumps(made))
    wait_for_phase(kubectl, "Running", made)


def packed(kept: Path) -> bytes:
    output = io.BytesIO()
    pack(kept, "1", ["models/plant-a"], output)
    return output.getvalue()


BEGINNING = "head -c 300000 /bin2/stream"


def signed_statement(folder: Path, authority: CertificateAuthority, job: JobKey, uid: str) -> bytes:
    """Return the statement of a worker as that site's keeper signs it."""
    saver = WorkerIdentity(Rank(0), authority.site, "small", 0)
    provenance = ModelProvenance(
        run=StatedRun(job.namespace, job.name, job.run_id),
        site=authority.site,
        saved_by=saver.name,
        saved_at=datetime.now(UTC).isoformat(),
        model="averaged",
        policy="adaptive",
        dlion_version="0",
        start_model_sha256="",
        workers=(WorkerUpdates(0, saver.name, Evidence.REPLICA, 640, 10),),
    )
    statement = ProvenanceStatement(stated_digests(folder), provenance)
    key, who = WorkerKey(), KeeperIdentity(authority.site)
    credentials = WorkerCredentials(key, authority.sign(key.csr_pem(), who, job), {})
    root = folder.parents[1]
    revoked = RevokedWorkers(root, is_over=False)
    signer = ProvenanceSigner(job, uid, authority.site, root, credentials, revoked)
    return signer.signed(statement.to_json(), saver)


EXPECTED = "-m dlion_worker.artifact_server.pack --run 1 models/plant-a"


def test_a_model_is_fetched_completely(
    job: Kubectl, busybox: str, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f'[ "$*" = "{EXPECTED}" ] || {{ echo "asked for $*" >&2; exit 66; }}; cat /bin2/stream'
    keeper(job, busybox, packed(kept), script)
    out = kept.parent / "out"
    out.mkdir()
    (out / "model.json").write_text("old")
    assert dlion(job, "fetch", JOB, "--out", str(out)) == ExitCode.DATA
    assert "no statement (model.provenance.json); nothing was changed" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["model.json"]
    unsigned = dlion(job, "fetch", JOB, "--out", str(out), "--allow-unsigned")
    assert unsigned == 0, capsys.readouterr().err
    assert (out / "model.keras").read_bytes() == MODEL
    assert json.loads((out / "model.json").read_text()) == {"model": "averaged"}
    assert str(out / "model.keras") in capsys.readouterr().out.splitlines()
    for options in (["--as=jane", "--as-group=system:masters"], ["--insecure-skip-tls-verify"]):
        again = ["fetch", JOB, "--out", str(out), "--allow-unsigned", *options]
        assert dlion(job, *again) == 0, capsys.readouterr().err
    assert dlion(job, "fetch", JOB, "--out", str(out), "--as=jane") == ExitCode.DENIED
    capsys.readouterr()
    assert dlion(job, "fetch", JOB, "--out", str(out), "--site", "plant-b") == ExitCode.DATA
    assert "asked for" in capsys.readouterr().err
    assert sorted(p.name for p in out.iterdir()) == ["model.json", "model.keras"]


def test_a_signed_model_is_verified_by_the_authority_in_the_cluster(
    job: Kubectl, busybox: str, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site, key = SiteName("plant-a"), JobKey(job.namespace, JOB, "1")
    authority, other = CertificateAuthority(site), CertificateAuthority(site)
    uid = job.run("get", "dlj", JOB, "-o", "jsonpath={.metadata.uid}")
    folder = kept / "1" / "models" / site
    (folder / PROVENANCE_FILE).write_bytes(signed_statement(folder, authority, key, uid))
    keeper(job, busybox, packed(kept), "cat /bin2/stream")
    out, pinned = kept.parent / "out", kept.parent / "other.pem"
    pinned.write_bytes(other.bundle_pem)

    def fetch(*arguments: str) -> tuple[int, str, str]:
        code = dlion(job, "fetch", JOB, "--out", str(out), *arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    code, _, problem = fetch()
    assert (code, "--trust FILE" in problem) == (ExitCode.UNAVAILABLE, True), problem
    config_map = {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": names.run_name(key)},
        "data": {names.AUTHORITY_KEY: authority.bundle_pem.decode()},
    }  # fmt: skip
    job.apply(config_map)
    code, _, problem = fetch("--trust", str(pinned))
    assert (code, "not by the trusted authority" in problem) == (ExitCode.DATA, True), problem
    assert not list(out.iterdir())
    code, _, shown = fetch()
    assert (code, "plant-a: signed by plant-a's keeper" in shown) == (0, True), shown
    assert "  plant-a/small-0: replica, 640 samples, to iteration 10" in shown
    code, printed, problem = fetch("-o", "json")
    assert code == 0, problem
    (model,) = json.loads(printed)["models"]
    assert (model["signed"], model["provenance"]["run"]["uid"]) == (True, uid)
    assert (out / "model.keras").read_bytes() == MODEL


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        (BEGINNING, ExitCode.UNAVAILABLE, "to its end"),
        (f"{BEGINNING}; echo broken >&2; exit 1", ExitCode.DATA, "broken"),
        (
            f"{BEGINNING}; printf X; tail -c +300002 /bin2/stream",
            ExitCode.FAILED,
            "SHA-256 differs",
        ),
        ("echo nonsense", ExitCode.UNAVAILABLE, "to its end"),
    ],
    ids=["cut off", "failing", "damaged", "no tar"],
)
def test_a_broken_fetch_keeps_the_existing_files(
    job: Kubectl,
    busybox: str,
    kept: Path,
    capsys: pytest.CaptureFixture[str],
    script: str,
    code: ExitCode,
    words: str,
) -> None:
    keeper(job, busybox, packed(kept), script)
    out = kept.parent / "out"
    out.mkdir()
    (out / "model.keras").write_text("old")
    ended = dlion(job, "fetch", JOB, "--out", str(out))
    stderr = capsys.readouterr().err
    assert (ended, words in stderr) == (code, True), stderr
    assert {p.name: p.read_text() for p in out.iterdir()} == {"model.keras": "old"}


def test_a_keeper_without_python_is_reported(
    job: Kubectl, busybox: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = pod(busybox, names.KEEPER, "sleep 600")
    job.apply(made)
    wait_for_phase(job, "Running", made)
    assert dlion(job, "fetch", JOB, "--out", str(tmp_path / "out")) == ExitCode.DATA
    assert "python" in capsys.readouterr().err


# ---- describe and top ----------------------------------------------------------------------------


def named(pod: dict[str, Any]) -> dict[str, Any]:
    """Rename that pod as its Job does; its events are found by that name."""
    group = pod["metadata"]["labels"][names.GROUP_LABEL]
    made = names.group_job_name(JobKey("", JOB, "1"), group)
    pod["metadata"]["name"] = f"{made}-0-{uuid.uuid4().hex[:5]}"
    return pod


def problems(kubectl: Kubectl, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """Return the problems that describe finds, by reason."""
    capsys.readouterr()
    assert dlion(kubectl, "describe", JOB, "-o", "json") == 0
    return {each["reason"]: each for each in json.loads(capsys.readouterr().out)["problems"]}


def test_describe_finds_why_pods_do_not_run(
    job: Kubectl, busybox: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The messages are those of this version of Kubernetes."""
    nowhere, greedy, unset, unmounted = (
        named(worker(busybox, group, 0, "true")) for group in ("labels", "cpu", "map", "secret")
    )
    nowhere["spec"]["nodeSelector"] = {"no": "such"}
    greedy["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "5000"}}
    unset["spec"]["containers"][0]["envFrom"] = [{"configMapRef": {"name": "no-such-map"}}]
    unmounted["spec"]["volumes"] = [{"name": "v", "secret": {"secretName": "no-such-secret"}}]
    unmounted["spec"]["containers"][0]["volumeMounts"] = [{"name": "v", "mountPath": "/v"}]
    job.apply(
        nowhere, greedy, unset, unmounted,
        named(worker("dlion.test/none:0", "image", 0, "true")),
        worker(busybox, "raises", 0, "echo no such layer; exit 67"),
    )  # fmt: skip
    wanted = {
        "NodeSelectorMismatch": nowhere, "InsufficientResources": greedy,
        "ConfigMapMissing": unset, "SecretMissing": unmounted,
    }  # fmt: skip
    deadline_s = time.monotonic() + 90
    found, images = problems(job, capsys), set[str]()
    # During a retry a pull has no error for a moment.
    while not images or not {*wanted, "CrashLoopBackOff"} <= found.keys():
        assert time.monotonic() < deadline_s, sorted(found)
        time.sleep(1)
        found = problems(job, capsys)
        images = {
            reason for reason in found if reason.startswith(("Image", "Registry", "ErrImage"))
        }
    for reason, made in wanted.items():
        assert found[reason]["object"] == f"pod/{made['metadata']['name']}"
        assert found[reason]["severity"] == "error"
    assert "67 (PROGRAM)" in found["CrashLoopBackOff"]["message"]
    assert found["CrashLoopBackOff"]["command"].startswith(f"dlion logs {JOB} --group raises")


def test_describe_finds_why_no_pod_is_created(
    job: Kubectl, busybox: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is a quota, from the Job controller's event."""
    made = worker(busybox, "small", 0, "true")
    quota = {
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"},
        "spec": {"hard": {"pods": "0"}},
    }  # fmt: skip
    parent = {
        "apiVersion": "batch/v1", "kind": "Job",
        "metadata": {"name": names.group_job_name(JobKey("", JOB, "1"), "small")},
        "spec": {
            "template": {
                "metadata": {"labels": made["metadata"]["labels"]},
                "spec": {**made["spec"], "restartPolicy": "Never"},
            }
        },
    }  # fmt: skip
    job.apply(quota)
    job.wait("--for=jsonpath={.status.hard.pods}=0", "resourcequota/none")
    job.apply(parent)
    deadline_s = time.monotonic() + 60
    while "QuotaExceeded" not in (found := problems(job, capsys)):
        assert time.monotonic() < deadline_s, found
        time.sleep(0.5)
    assert found["QuotaExceeded"]["object"] == f"job/{parent['metadata']['name']}"
    assert "kubectl describe resourcequota none" in found["QuotaExceeded"]["command"]
    assert dlion(job, "events", JOB, "--types", "Warning") == 0
    assert "exceeded quota: none" in capsys.readouterr().out


def test_top_reads_metrics_of_a_pod(
    job: Kubectl, busybox: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the sidecar's place a shell script counts steps."""
    script = """mkdir /www; cd /www; n=0
while :; do n=$((n+10)); echo "dlion_steps_total $n
dlion_capacity_samples_per_second 813
dlion_link_budget_bytes{peer_site=\\"plant-b\\"} 2000" > new; mv new metrics; sleep 0.5; done &
exec httpd -f -p 9440 -h /www"""
    made = worker(busybox, "small", 0, script)
    job.apply(made, worker("dlion.test/none:0", "large", 0, "true"))
    wait_for_phase(job, "Running", made)
    deadline_s = time.monotonic() + 30
    while dlion(job, "top", JOB, "-o", "json") != 0:
        assert time.monotonic() < deadline_s, capsys.readouterr().err
        capsys.readouterr()
    found = json.loads(capsys.readouterr().out)
    large, small = found["workers"]
    assert small["samplesPerSecond"] == 813
    assert 5 < small["stepsPerSecond"] < 40
    assert "does not run" in large["problem"]
    assert found["sites"][0]["budgetBytesPerIteration"] == 2000
