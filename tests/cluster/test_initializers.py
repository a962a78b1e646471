"""Test the downloads of a job in a cluster.

With a real API server and the test in the kubelet's place: the Job of a group with initializers is
accepted. An end that no retry helps fails the job at once with the container's message. Another end
leads to a new pod, which is counted. A rule for failed downloads overrides both, for any exit code.
With pods: a job trains on an archive from a server in the cluster, and one with a wrong digest
fails and names it.

Left out: single decisions (tests/unit/operator), the download of a file (tests/unit), rights to a
download's Secret (test_tenancy).
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

import trained_jobs
from dlion_api.cluster_names import GROUP_LABEL
from dlion_api.errors import UnavailableError
from podless_jobs import conditions, manifest, workers
from testbed.project_images import Target
from trained_jobs import eventually, status_of

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl
    from testbed.project_images import ProjectImage

pytestmark = pytest.mark.cluster

TIME = "2026-01-31T12:00:00Z"
SHA256 = "0123456789abcdef" * 4
DATASET = "dataset-initializer"


def trainer(url: str, sha256: str = SHA256) -> dict[str, Any]:
    return {
        "program": {"builtin": "digits"},
        "dataset": {"path": "data/digits.npz", "format": "npz"},
        "initializer": {"dataset": {"url": url, "sha256": sha256}},
        "stop": {"maxSteps": 20},
    }


def fail(kubectl: Kubectl, code: int, message: str, *groups: str) -> None:
    """In the kubelet's place, end the initializers of all running pods, or of these groups'."""
    ended = {"exitCode": code, "reason": "Error", "message": message, "startedAt": TIME,
             "finishedAt": TIME}  # fmt: skip
    status = {"phase": "Failed", "initContainerStatuses": [
        {"name": DATASET, "image": "x", "imageID": "x", "ready": False, "restartCount": 0,
         "state": {"terminated": ended}}]}  # fmt: skip
    for pod in living(kubectl, *groups):
        try:
            kubectl.run("patch", "pod", pod["metadata"]["name"], "--subresource=status",
                        "--type=merge", "-p", json.dumps({"status": status}))  # fmt: skip
        except UnavailableError as error:  # deleted, since the first failure has ended the run
            if "NotFound" not in str(error):
                raise


def living(kubectl: Kubectl, *groups: str) -> list[dict[str, Any]]:
    pods = [pod for pod in workers(kubectl) if pod["status"]["phase"] != "Failed"]
    return [pod for pod in pods if not groups or pod["metadata"]["labels"][GROUP_LABEL] in groups]


@pytest.mark.usefixtures("no_running_pods", "shared_operator")
def test_a_retry_gets_another_pod_and_a_wrong_address_does_not(kubectl: Kubectl) -> None:
    kubectl.apply(manifest(small=1, trainer=trainer("https://example.com/d.tar.gz")))
    eventually(lambda: len(living(kubectl)) == 2)
    first = {pod["metadata"]["uid"] for pod in living(kubectl)}
    fail(kubectl, 69, "example.com: connection refused")
    eventually(
        lambda: (
            len(living(kubectl)) == 2
            and not first & {pod["metadata"]["uid"] for pod in living(kubectl)}
        ),
        within_s=90,
    )
    count = "batch.kubernetes.io/job-index-failure-count"
    assert {pod["metadata"]["annotations"][count] for pod in living(kubectl)} == {"1"}
    fail(kubectl, 66, "https://example.com/d.tar.gz: HTTP 404 Not Found. Correct the address")
    eventually(lambda: conditions(kubectl)["Failed"][0] == "True")
    _, reason, message = conditions(kubectl)["Failed"]
    assert reason == "InitializerFailed"
    assert f"{DATASET} ended with 66 (DATA): https://example.com/d.tar.gz: HTTP 404" in message


@pytest.mark.usefixtures("no_running_pods", "shared_operator")
def test_a_rule_decides_about_a_failed_download(kubectl: Kubectl) -> None:
    rules = [
        {"onEnds": ["InitializerFailed"], "groups": ["small"], "action": "Ignore"},
        {"onEnds": ["InitializerFailed"], "action": "FailRun"},
    ]
    job = manifest(small=1, trainer=trainer("https://example.com/d.tar.gz"), failureRules=rules)
    kubectl.apply(job)
    eventually(lambda: len(living(kubectl)) == 2)
    (first,) = living(kubectl, "small")
    fail(kubectl, 66, "https://example.com/d.tar.gz: HTTP 404 Not Found", "small")

    def others() -> list[dict[str, Any]]:
        found = living(kubectl, "small")
        return [pod for pod in found if pod["metadata"]["uid"] != first["metadata"]["uid"]]

    (second,) = eventually(others, within_s=90, what="another pod")
    count = "batch.kubernetes.io/job-index-ignored-failure-count"
    assert second["metadata"]["annotations"][count] == "1"
    fail(kubectl, 69, "example.com: connection refused", "large")
    eventually(lambda: conditions(kubectl)["Failed"][0] == "True")
    _, reason, message = conditions(kubectl)["Failed"]
    assert (reason, message.partition("; ")[0]) == (
        "FailedByRule", "failureRules[1] is FailRun for InitializerFailed"
    )  # fmt: skip


def archive() -> bytes:
    """The digits in a folder."""
    images, labels = load_digits(return_X_y=True)
    data, packed = io.BytesIO(), io.BytesIO()
    np.savez_compressed(data, x=images.reshape(-1, 8, 8, 1).astype(np.uint8), y=labels)
    with tarfile.open(fileobj=packed, mode="w:gz") as made:
        member = tarfile.TarInfo("data/digits.npz")
        member.size = len(data.getvalue())
        made.addfile(member, io.BytesIO(data.getvalue()))
    return packed.getvalue()


def serve(kubectl: Kubectl, image: str, content: bytes) -> str:
    """Serve that file in a pod and return its URL. Workers may reach it."""
    served = {"name": "www", "configMap": {"name": "www"}}
    kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "www"},
            "binaryData": {"digits.tar.gz": base64.b64encode(content).decode()},
        },
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "downloads"},
            "spec": {
                "podSelector": {},
                "policyTypes": ["Egress"],
                "egress": [{"ports": [{"port": 8080}]}],
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "www"},
            "spec": {
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": 65532,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [
                    {
                        "name": "www",
                        "image": image,
                        "command": ["python3", "-m", "http.server", "8080", "-d", "/www"],
                        "securityContext": {
                            "allowPrivilegeEscalation": False,
                            "capabilities": {"drop": ["ALL"]},
                        },
                        "volumeMounts": [{"name": "www", "mountPath": "/www"}],
                    }
                ],
                "volumes": [served],
            },
        },
    )
    kubectl.wait("--for=condition=Ready", "pod/www", timeout_s=60)
    return f"http://{kubectl.get('pod', 'www')['status']['podIP']}:8080/digits.tar.gz"


@pytest.mark.root
@pytest.mark.timeout(600)
def test_a_job_trains_on_its_download(
    restricted: Kubectl, images: dict[Target, ProjectImage]
) -> None:
    content = archive()
    url = serve(restricted, images[Target.WORKER].reference, content)
    good = trained_jobs.manifest(
        {"a": 500}, trainer=trainer(url, hashlib.sha256(content).hexdigest())
    )
    bad = trained_jobs.manifest({"a": 500}, trainer=trainer(url))
    bad["metadata"]["name"] = "wrong"
    restricted.apply(good, bad)

    def condition(name: str, type_: str) -> dict[str, Any]:
        found = status_of(restricted, name).get("conditions") or ()
        return next((each for each in found if each["type"] == type_), {})

    eventually(lambda: condition("wrong", "Failed").get("status") == "True", within_s=120)
    failed = condition("wrong", "Failed")
    assert failed["reason"] == "InitializerFailed"
    assert "digits.tar.gz: another SHA-256 than the manifest's" in failed["message"]
    eventually(lambda: condition("digits", "Succeeded").get("status") == "True", within_s=240)
    (pod,) = workers(restricted)
    log = restricted.run("logs", pod["metadata"]["name"], "-c", DATASET)
    assert "(100%)" in log
    assert "verified" in log
