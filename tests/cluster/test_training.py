"""A job trained by real pods: the chart installed, a manifest applied, the model fetched.

Proves: three groups with hard CPU limits 4:2:1 train together from images of this tree, shares
of the batch follow the limits, `kubectl wait` sees the end, the fetched model knows the digits; a
killed worker process, a deleted pod and a killed operator are no end of the run; a suspended job
goes on where it was, on another node; deleting leaves nothing; a missing image or Secret, a node
that there is none of, a program that raises and too little memory are said with a reason; kstatus,
Flux and Argo CD say of each what docs/conditions.md says. Prints how long it took from `kubectl
apply` to the first step, and to each of these.
Left out: several sites (federation), faults of the API server, workers that are lost while they
train (test_worker_losses).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gitops.agreement import agree
from gitops.documents import FAILED, STUCK, SUCCEEDED, SUSPENDED, TRAINING
from trained_jobs import (
    SYSTEM,
    eventually,
    fetched,
    iteration,
    manifest,
    records,
    status_of,
    wait_until_trains,
)

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.root, pytest.mark.timeout(900)]
KINDS = "jobs,services,configmaps,deployments,pvc,pods"
CPU = {"large": 800, "medium": 400, "small": 200}
"""Thousandths of a core."""


@pytest.fixture
def kubectl(restricted: Kubectl) -> Kubectl:
    """The namespace of a test."""
    return restricted


def accuracy(model: Path) -> float:
    """Of a saved model on all digits, judged by Keras alone."""
    code = (
        "import sys, keras, numpy\n"
        "from sklearn.datasets import load_digits\n"
        "data = load_digits()\n"
        "model = keras.models.load_model(sys.argv[1])\n"
        "x = data.images.astype('float32')[..., None] / 16\n"
        "print((model.predict(x, verbose=0).argmax(1) == data.target).mean())\n"
    )
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)],
        env=environment, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return float(done.stdout.split()[-1])


def test_a_job_trains_on_unequal_workers_and_its_model_is_fetched(
    kubectl: Kubectl, tmp_path: Path
) -> None:
    applied_s = time.time()
    kubectl.apply(manifest(CPU))
    eventually(lambda: status_of(kubectl).get("stepsPerSecond"), within_s=200, what="steps")
    wait_until_trains(kubectl)
    agree(kubectl.get("dlj", "digits"), TRAINING)
    print(kubectl.run("get", "dlj"))
    kubectl.wait("--for=condition=Succeeded", "dlj/digits", timeout_s=300)
    agree(kubectl.get("dlj", "digits"), SUCCEEDED)
    print(kubectl.run("get", "dlj"))
    status = status_of(kubectl)
    assert status["trainerStatus"]["progressPercentage"] == 100
    assert status["readyWorkers"] == "3/3"
    results = fetched(kubectl, tmp_path / "all", "--all")
    summary = json.loads((results / "summary.json").read_text())
    print(json.dumps(summary)[:400])
    tell_start(kubectl, results, applied_s)
    shares = last_shares(results)
    print(f"shares of the batch: {shares}")
    assert shares[0] > 1.4 * shares[1] > 1.4 * 1.4 * shares[2]
    model = fetched(kubectl, tmp_path / "model")
    assert accuracy(model / "model.keras") >= 0.9
    kubectl.run("delete", "dlj", "digits", "--wait=true")
    eventually(lambda: not kubectl.get(KINDS, "-l", "dlion.dev/job-name=digits")["items"])


def tell_start(kubectl: Kubectl, results: Path, applied_s: float) -> None:
    """Prints how long it took from `kubectl apply` to the first step of each worker."""
    stamps = kubectl.get("jobs", "-l", "dlion.dev/job-name=digits")["items"]
    made_s = min(_seconds(each["metadata"]["creationTimestamp"]) for each in stamps)
    for rank in range(3):
        first = min(each["time_s"] for each in records(results, "step") if each["rank"] == rank)
        print(f"worker {rank}: first step {made_s + first - applied_s:.1f} s after kubectl apply")


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def last_shares(results: Path) -> list[float]:
    """Share of each rank in the batch, mean over the last half of its steps."""
    steps = records(results, "step")
    means = []
    for rank in range(3):
        own = [each for each in steps if each["rank"] == rank]
        late = own[len(own) // 2 :]
        means.append(
            sum(each["local_batch_size"] / each["global_batch_size"] for each in late) / len(late)
        )
    return [round(mean, 3) for mean in means]


RAISES = """
def build_model():
    raise ValueError("no such layer: convolution3")
def load_data():
    raise AssertionError("is never asked")
"""


WITH_A_SECRET = {
    "volumes": [{"name": "nowhere", "secret": {"secretName": "nowhere"}}],
    "containers": [
        {"name": "trainer", "volumeMounts": [{"name": "nowhere", "mountPath": "/nowhere"}]}
    ],
}
NOWHERE = {"nodeSelector": {"dlion.test/node": "nowhere"}}


def test_what_goes_wrong_is_said_with_what_to_do(kubectl: Kubectl) -> None:
    began_s = time.monotonic()
    kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "mine"},
            "data": {"job.py": RAISES},
        },
        named(manifest({"a": 500}), "no-image", {"image": "dlion.test/nowhere:1"}),
        named(
            manifest({"a": 500}),
            "raises",
            {"program": {"configMap": {"name": "mine", "key": "job.py"}}},
        ),
        too_little_memory(manifest({"a": 500}, maxRestarts=0), "200Mi"),
        named(manifest({"a": 500}, podTemplate={"spec": WITH_A_SECRET}), "no-secret", {}),
        named(manifest({"a": 500}, podTemplate={"spec": NOWHERE}), "no-node", {}),
    )
    print("| job | reason | after | message |\n|---|---|---|---|")
    for name, type_, reason, words in (
        ("raises", "Failed", "ProgramFailed", "no such layer: convolution3"),
        ("no-memory", "Failed", "RestartsExceeded", "137 (signal 9)"),
        ("no-node", "Stalled", "Unschedulable", "a-0: 0/2 nodes are available"),
        ("no-secret", "Stalled", "ContainerBroken", "its volumes or its network are not there"),
        ("no-image", "Stalled", "ImageUnavailable", "dlion.test/nowhere:1"),
    ):
        kubectl.wait(f"--for=condition={type_}", f"dlj/{name}", timeout_s=180)
        document = kubectl.get("dlj", name)
        agree(document, STUCK if type_ == "Stalled" else FAILED)
        (said,) = [each for each in document["status"]["conditions"] if each["type"] == type_]
        assert said["reason"] == reason
        assert words in said["message"], said["message"]
        after_s = time.monotonic() - began_s
        print(f"| {name} | {reason} | {after_s:.0f} s | {said['message']} |")


def named(document: dict[str, Any], name: str, trainer: dict[str, Any]) -> dict[str, Any]:
    """That manifest under another name, with these fields of its trainer."""
    if "program" in trainer:
        del document["spec"]["trainer"]["program"]
    document["metadata"]["name"] = name
    document["spec"]["trainer"] |= trainer
    return document


def too_little_memory(document: dict[str, Any], limit: str) -> dict[str, Any]:
    """That manifest with less memory than TensorFlow takes."""
    (group,) = document["spec"]["sites"][0]["groups"]
    group["resources"]["limits"]["memory"] = limit
    return named(document, "no-memory", {})


def test_it_goes_on_though_a_process_a_pod_and_the_operator_are_killed(kubectl: Kubectl) -> None:
    kubectl.apply(manifest({"a": 500, "b": 500}, startDeadlineSeconds=60))
    wait_until_trains(kubectl)
    pods = {
        each["metadata"]["labels"]["dlion.dev/group"]: each["metadata"]["name"]
        for each in kubectl.get("pods", "-l", "app.kubernetes.io/component=worker")["items"]
    }
    kill = "import os, signal; [os.kill(int(p), 9) for p in os.listdir('/proc') if p.isdigit()"
    kill += " and b'dlion_worker.trainer' in open(f'/proc/{p}/cmdline','rb').read()"
    kill += " and p != '1' and int(p) != os.getpid()]"
    kubectl.run("exec", pods["a"], "-c", "trainer", "--", "python3", "-c", kill)
    operator = replace(kubectl, namespace=SYSTEM)
    name = operator.get("pods", "-l", "app.kubernetes.io/component=operator")["items"][0]
    operator.run("delete", "pod", name["metadata"]["name"], "--grace-period=0", "--force")
    kubectl.run("delete", "pod", pods["b"], "--wait=false")
    kubectl.wait("--for=condition=Succeeded", "dlj/digits", timeout_s=300)
    jobs = kubectl.get("jobs")["items"]
    assert sorted(each["status"].get("succeeded") for each in jobs) == [1, 1]


def test_a_suspended_job_goes_on_where_it_was_on_another_node(
    kubectl: Kubectl, tmp_path: Path
) -> None:
    document = manifest({"a": 500, "b": 500})
    kubectl.apply(document)
    wait_until_trains(kubectl)
    eventually(lambda: iteration(kubectl) > 5, what="iterations")
    keeper = kubectl.get("pods", "-l", "app.kubernetes.io/component=keeper")["items"][0]
    used = {
        each["spec"]["nodeName"]
        for each in kubectl.get("pods", "-l", "app.kubernetes.io/component=worker")["items"]
    }
    document["spec"]["suspend"] = True
    kubectl.apply(document)
    eventually(lambda: not kubectl.get("pods", "-l", "app.kubernetes.io/component=worker")["items"])
    agree(kubectl.get("dlj", "digits"), SUSPENDED)
    early = _steps(kubectl, tmp_path / "before")
    before = max(each["iteration"] for each in early)
    known = {each["incarnation"] for each in early}
    everywhere = {each["metadata"]["name"] for each in kubectl.get("nodes")["items"]}
    for node in used if used != everywhere else {keeper["spec"]["nodeName"]}:
        kubectl.run("cordon", node)
    try:
        document["spec"]["suspend"] = False
        kubectl.apply(document)
        kubectl.wait("--for=condition=Succeeded", "dlj/digits", timeout_s=300)
    finally:
        kubectl.run("uncordon", *everywhere)
    after = _steps(kubectl, tmp_path / "after")
    first = min(each["iteration"] for each in after if each["incarnation"] not in known)
    print(f"iteration {before} before the break, {first} after it")
    assert first == before + 1


def _steps(kubectl: Kubectl, out: Path) -> list[dict[str, Any]]:
    return records(fetched(kubectl, out, "--all"), "step")
