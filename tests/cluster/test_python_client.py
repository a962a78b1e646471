"""Test `dlion.Client(backend="kubernetes")` against a real API server.

The test writes the status in the operator's place. A job is submitted with its program, read,
listed, awaited across its states and deleted. Its figures are those of the status. A failed and a
concurrently deleted job raise an error. Invalid input is refused with the errors of the command
line and leaves nothing. A worker's pod is found by the job's rank, only at this site.

Left out: lines of logs and the keeper's records, which need a node: the commands' own tests read
them by the same code (test_cli_pods).
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dlion
from api_server import Jobs, jobs_of
from dlion.errors import AbsentError, DataError, ProgramError, SpecError, UnavailableError
from manifest_table import changed, smallest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from testbed.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.root]

NOW = "2026-01-31T12:00:00Z"
SITES = [
    {"name": "plant-a", "groups": [{"name": "small", "workers": 2}]},
    {"name": "plant-b", "groups": [{"name": "large", "workers": 1}]},
]


@pytest.fixture
def jobs(kubectl: Kubectl) -> Iterator[Jobs]:
    with jobs_of(kubectl) as made:
        made.wait_until_served()
        yield made


@pytest.fixture
def client(kubectl: Kubectl) -> Iterator[dlion.Client]:
    with dlion.Client(
        "kubernetes", kubeconfig=str(kubectl.kubeconfig), namespace=kubectl.namespace
    ) as made:
        yield made


def manifest(**changes: Any) -> dict[str, Any]:
    fields = {f"spec.{name}": value for name, value in changes.items()}
    return changed(smallest(), {"metadata.name": "digits", "spec.sites": SITES, **fields})


def condition(type_: str, status: str, reason: str, message: str = "") -> dict[str, Any]:
    return {
        "type": type_, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": NOW, "observedGeneration": 1,
    }  # fmt: skip


def write_status(jobs: Jobs, state: str, *conditions: dict[str, Any], run_id: str = "1") -> None:
    """Write the status as the operator does."""
    status = {
        "observedGeneration": 100, "state": state, "runId": run_id,
        "conditions": list(conditions),
        "sites": [
            {"name": "plant-a", "state": "Ready", "workers": 2, "readyWorkers": 2},
            {"name": "plant-b", "state": "Starting", "workers": 1, "readyWorkers": 0},
        ],
        "trainerStatus": {
            "progressPercentage": 42, "estimatedRemainingSeconds": 90,
            "metrics": [
                {"name": name, "value": value}
                for name, value in {"loss": "0.31", "accuracy": "0.92", "auc": "0.5"}.items()
            ],
        },
    }  # fmt: skip
    answer = jobs.replace_status("digits", jobs.get("digits") | {"status": status}, dry_run=False)
    assert answer.accepted, answer.message


def later(*steps: Callable[[], object]) -> threading.Thread:
    def work() -> None:
        for step in steps:
            time.sleep(0.7)
            step()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


READY = condition("Ready", "True", "Training", "all train")
SUCCEEDED = condition("Succeeded", "True", "Completed", "target reached")
FAILED = condition("Failed", "True", "ProgramFailed", "it raised")


def test_a_job_from_its_start_to_its_end(client: dlion.Client, jobs: Jobs) -> None:
    job = client.train(manifest(), set={"trainer.seed": 7, "runId": "1"})
    assert (job.name, job.backend, job.state) == ("digits", "kubernetes", "Pending")
    assert jobs.get("digits")["spec"]["trainer"]["seed"] == 7
    assert job.created is not None
    assert job.result_folder is None
    assert [(each.rank, each.name) for each in job.workers] == [
        (0, "plant-a/small-0"), (1, "plant-b/large-0"), (2, "plant-a/small-1"),
    ]  # fmt: skip
    observed: list[dlion.Job] = []

    def train_after_waiting() -> None:
        while not observed or observed[-1].state != "Waiting":
            time.sleep(0.05)
        write_status(jobs, "Training", READY)

    thread = later(
        lambda: write_status(jobs, "Waiting", condition("Ready", "False", "WaitingForPeers")),
        train_after_waiting,
    )
    training = client.wait_for_job_status(
        "digits", {"Training"}, timeout_s=60, callback=observed.append
    )
    thread.join()
    assert (training.reason, training.message) == ("Training", "all train")
    assert (training.progress, training.eta_s) == (0.42, 90)
    assert (training.loss, training.accuracy, training.metrics) == (0.31, 0.92, {"auc": 0.5})
    assert [each.state for each in training.workers] == ["training", "starting", "training"]
    thread = later(lambda: write_status(jobs, "Succeeded", SUCCEEDED))
    ended = client.wait_for_job_status("digits", timeout_s=60, callback=observed.append)
    thread.join()
    assert (ended.state, ended.reason, ended.message) == (
        "Succeeded",
        "Completed",
        "target reached",
    )
    assert ended.eta_s is None
    assert {each.state for each in ended.workers} == {"finished"}
    assert [*dict.fromkeys(each.state for each in observed)] == [
        "Pending", "Waiting", "Training", "Succeeded",
    ]  # fmt: skip
    assert client.list_jobs() == [ended]
    assert "target reached" in ended._repr_html_()
    with pytest.raises(SpecError, match=r"has ended already \(Succeeded\).*runId"):
        client.train(manifest())
    again = client.train(manifest(), set={"runId": "2"})
    assert (again.state, again.progress, again.accuracy) == ("Pending", None, None)
    client.delete_job("digits")
    left = jobs.get("digits") if client.list_jobs() else {"metadata": {"deletionTimestamp": NOW}}
    assert "deletionTimestamp" in left["metadata"]


def test_a_failed_or_deleted_job_is_raised(
    client: dlion.Client, jobs: Jobs, kubectl: Kubectl
) -> None:
    client.train(manifest())
    with pytest.raises(dlion.JobTimeoutError, match=r"is Pending.*within 1 s"):
        client.wait_for_job_status("digits", timeout_s=1)
    thread = later(lambda: write_status(jobs, "Failed", FAILED))
    with pytest.raises(dlion.JobEndedError, match=r"Failed \(ProgramFailed\).*it raised"):
        client.wait_for_job_status("digits", timeout_s=30)
    thread.join()
    client.train(manifest(), set={"runId": "2"})
    thread = later(lambda: kubectl.run("delete", "dlj", "digits"))
    with pytest.raises(AbsentError, match="was deleted"):
        client.wait_for_job_status("digits", timeout_s=30)
    thread.join()
    for method in (client.get_job, client.delete_job, client.get_job_logs, client.get_job_metrics):
        with pytest.raises(AbsentError, match="no DLionJob 'digits'"):
            method("digits")


def test_a_program_is_submitted_with_the_job(
    client: dlion.Client, jobs: Jobs, kubectl: Kubectl, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text("def build_model():\n    pass\n")
    document = manifest()
    document["spec"]["trainer"]["program"] = {"file": "program.py"}
    (tmp_path / "job.json").write_text(json.dumps(document))
    client.train(tmp_path / "job.json")
    program = jobs.get("digits")["spec"]["trainer"]["program"]
    (stored,) = [
        each
        for each in kubectl.get("configmaps")["items"]
        if each["metadata"]["name"] == program["configMap"]["name"]
    ]
    assert stored["data"] == {"program.py": "def build_model():\n    pass\n"}
    assert stored["metadata"]["ownerReferences"][0]["name"] == "digits"


def test_invalid_input_is_refused_and_leaves_nothing(client: dlion.Client, tmp_path: Path) -> None:
    for changes, message in (
        ({"trainer.stop": {}}, "needs a stop rule"),
        ({"metadata.namespace": "elsewhere"}, "differs from the namespace"),
        ({"metadata.labels": {"a": "!"}}, "the API server|labels"),
    ):
        with pytest.raises(SpecError, match=message):
            client.train(manifest(), set=changes)
    with pytest.raises(ProgramError, match="no such file"):
        client.train(manifest(), set={"trainer.program": {"file": "none.py"}})
    with pytest.raises(SpecError, match="for runs on this machine"):
        client.train(manifest(), environment="quickstart")
    assert client.list_jobs() == []
    with pytest.raises(DataError, match="none"):
        dlion.Client("kubernetes", kubeconfig=str(tmp_path / "none"))


def test_a_workers_pod_is_found_by_its_rank_at_this_site(
    client: dlion.Client, kubectl: Kubectl
) -> None:
    client.train(manifest())
    with pytest.raises(UnavailableError, match="no pods of workers"):
        client.get_job_logs("digits")
    with pytest.raises(SpecError, match="is not a rank"):
        client.get_job_logs("digits", worker=-1)
    labels = {
        "dlion.dev/job-name": "digits", "dlion.dev/run-id": "1", "dlion.dev/site": "plant-a",
        "dlion.dev/group": "small", "batch.kubernetes.io/job-completion-index": "1",
        "app.kubernetes.io/component": "worker",
    }  # fmt: skip
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "small-1", "labels": labels},
        "spec": {
            "automountServiceAccountToken": False,
            "containers": [{"name": "trainer", "image": "none"}],
        },
    }  # fmt: skip
    kubectl.apply(pod)
    assert [*client.get_job_logs("digits", worker=2)] == [], "it has no node yet"
    labels["dlion.dev/site"] = "plant-c"
    kubectl.apply(pod)
    with pytest.raises(AbsentError, match="is at site plant-a"):
        client.get_job_logs("digits", worker=2)
    with pytest.raises(UnavailableError, match="no keeper pod"):
        client.get_job_metrics("digits")
