"""Test a job of workers with CPU limits of 4:2:1, from `kubectl apply` to the model.

Three groups with hard limits train together from images of this tree. Their shares of the batch
follow their CPU (in `make slow`: their limits). `kubectl wait` returns at the end. The fetched
model classifies images that the job did not train on, evaluated only by Keras. It predicts the same
as SavedModel (in `make slow`: also as TensorFlow Lite), loaded only by TensorFlow. Its keeper has
signed whose updates it holds. `fetch` refuses a model or description that was changed later,
without changing what it wrote before. Deletion leaves nothing. kstatus, Flux and Argo CD report it
as docs/conditions.md lists it.

In `make test` the job is `digits`. In such a small model the fixed cost of a step dominates, so
shares only keep the order of the limits. In `make slow` it is also `cipher` on CIFAR-10, if
../shared/data/cifar10 exists and the nodes are the testbed's. Its steps also take equally long for
each worker. The test prints the output of `kubectl get dlj`, the shares and the time to each
worker's first step.

Left out: quotas that change, several sites.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dlion_api import cluster_names as names
from dlion_api.exit_codes import ExitCode
from gitops.agreement import agree
from gitops.documents import SUCCEEDED, TRAINING
from site_files import bring_files
from start_times import report_starts, starts_of
from trained_jobs import (
    SITE,
    eventually,
    fetch,
    fetched,
    manifest,
    records,
    status_of,
    wait_until_trains,
)

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl
    from testbed.sites import Testbed

pytestmark = [pytest.mark.cluster, pytest.mark.root, pytest.mark.timeout(900)]
LONGEST_STEP = 1.3
"""Multiple of the shortest worker's step."""
CIFAR = Path(__file__).parents[3] / "shared" / "data" / "cifar10"
KINDS = "jobs,services,configmaps,deployments,pvc,pods"
CPU = {"large": 800, "medium": 400, "small": 200}
"""Thousandths of a core."""
CLAIM = "cifar10-data"
MOUNTS = {
    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": CLAIM, "readOnly": True}}],
    "containers": [
        {"name": "trainer", "volumeMounts": [{"name": "data", "mountPath": "/data"}]},
    ],
}
DIGITS = """
from sklearn.datasets import load_digits
data = load_digits()
x, y = data.images.astype("float32")[..., None] / 16, data.target
"""
PHOTOS = f"""
import tensorflow as tf
features = {{
    "image/encoded": tf.io.FixedLenFeature([], tf.string),
    "image/class/label": tf.io.FixedLenFeature([], tf.int64),
}}
read = tf.data.TFRecordDataset({str(CIFAR / "test.tfrecord")!r}).take(5000)
found = [tf.io.parse_single_example(each, features) for each in read]
x = numpy.stack([tf.io.decode_jpeg(each["image/encoded"]) for each in found]) / numpy.float32(255)
y = numpy.array([each["image/class/label"] for each in found])
"""
JUDGE = """
import tensorflow as tf
model = keras.models.load_model(sys.argv[1])
accuracy = (model.predict(x, batch_size=500, verbose=0).argmax(1) == y).mean()
x = x[:8]
logits = model.predict(x, verbose=0)
loaded = tf.saved_model.load(sys.argv[2])
served = loaded.serve(tf.constant(x)).numpy()
numpy.testing.assert_allclose(served, logits, rtol=1e-3, atol=1e-3)
"""
JUDGE_LITE = """
lite = tf.lite.Interpreter(model_path=sys.argv[3])
(taken,), (given,) = lite.get_input_details(), lite.get_output_details()
lite.allocate_tensors()
for image, wanted in zip(x, logits):
    lite.set_tensor(taken["index"], image[None])
    lite.invoke()
    numpy.testing.assert_allclose(lite.get_tensor(given["index"])[0], wanted, rtol=1e-3, atol=1e-3)
"""
FORMS = {"savedmodel": "saved_model", "tflite": "model.tflite"}
"""Forms of a model by `dlion fetch --format`."""


@dataclass(frozen=True)
class Task:
    """A task to learn: manifest, Python code that gives images `x` and labels `y`, and bounds."""

    document: dict[str, Any]
    images: str
    min_accuracy: float
    share_within: float | None
    """Relative bound on shares and step times; None: only their order is checked."""
    forms: tuple[str, ...]
    """Other forms that are fetched; tests/unit/worker/training has each of a small model."""

    @property
    def name(self) -> str:
        return str(self.document["metadata"]["name"])


@pytest.fixture(params=["digits", pytest.param("cifar10", marks=pytest.mark.slow)])
def task(
    other_cluster: Kubectl | None, restricted: Kubectl, request: pytest.FixtureRequest
) -> Task:
    """The digits, or CIFAR-10 on the nodes of the testbed's first site, where its files are.

    Beside other tests the largest worker may not reach its limit: cgroups weight groups of
    processes, and `nice` applies only within one. So `make slow` compares shares with the limits.
    """
    if request.param == "digits":
        document = manifest(CPU)
        document["spec"]["trainer"]["stop"] = {"maxSteps": 150}
        return Task(guaranteed(document), DIGITS, 0.9, None, ("savedmodel",))
    if other_cluster is not None or not (CIFAR / "train.tfrecord").is_file():
        pytest.skip(f"this takes the testbed's nodes and {CIFAR}")
    testbed: Testbed = request.getfixturevalue("testbed")
    files = [CIFAR / "train.tfrecord"]
    bring_files(testbed.site(SITE), files, claim=CLAIM, namespace=restricted.namespace)
    document = manifest(CPU, podTemplate={"spec": MOUNTS})
    document["metadata"]["name"] = "cifar10"
    dataset = {"path": "train.tfrecord", "format": "tfrecord", "evaluationFraction": 0.04}
    document["spec"]["trainer"] |= {
        "program": {"builtin": "cipher"},
        "dataset": dataset,
        # Each worker evaluates as often: frequent ones take a part of the smallest one's limit.
        "evaluation": {"everySamples": 50_000, "maxSamples": 500},
        "stop": {"maxSteps": 50},
    }
    # The fixed part of a step must be small beside the shares of the limits.
    document["spec"]["batching"]["globalBatchSize"] = {"initial": 1920, "growth": False}
    return Task(guaranteed(document), PHOTOS, 0.3, 0.1, tuple(FORMS))


def guaranteed(document: dict[str, Any]) -> dict[str, Any]:
    """Return that manifest with groups that request their limits.

    If the machine has too little for all, they get it in the same proportions.
    """
    for group in document["spec"]["sites"][0]["groups"]:
        group["resources"]["requests"]["cpu"] = group["resources"]["limits"]["cpu"]
    return document


def test_a_job_trains_on_unequal_workers_and_its_model_is_fetched(
    restricted: Kubectl, task: Task, tmp_path: Path
) -> None:
    kubectl, job = restricted, f"dlj/{task.name}"
    applied_s = time.monotonic()
    kubectl.apply(task.document)
    wait_until_trains(kubectl, task.name)
    agree(kubectl.get("dlj", task.name), TRAINING)
    starts = starts_of(kubectl, task.name)
    eventually(lambda: progress(kubectl, task) >= 50, within_s=180, what="half of the run")
    print(kubectl.run("get", "dlj"))
    kubectl.wait("--for=condition=Succeeded", job, timeout_s=300)
    agree(kubectl.get("dlj", task.name), SUCCEEDED)
    print(kubectl.run("get", "dlj"))
    assert (progress(kubectl, task), status_of(kubectl, task.name)["readyWorkers"]) == (100, "3/3")
    results = fetched(kubectl, tmp_path / "all", "--all", name=task.name)
    report_starts(starts, results, applied_s)
    model = fetched(kubectl, tmp_path / "model", name=task.name)
    print(f"ended and fetched {time.monotonic() - applied_s:.0f} s after kubectl apply")
    forms = [
        fetched(kubectl, tmp_path / form, "--format", form, name=task.name) / FORMS[form]
        for form in task.forms
    ]
    known = accuracy(task, model / "model.keras", *forms)
    print(f"accuracy of the fetched model on other images: {known:.1%}")
    assert known >= task.min_accuracy
    assert_shares(task, results)
    assert_signed(kubectl, task, model)
    kubectl.run("delete", job, "--wait=true")
    chosen = f"dlion.dev/job-name={task.name}"
    eventually(lambda: not kubectl.get(KINDS, "-l", chosen)["items"], what="nothing left")


def assert_signed(kubectl: Kubectl, task: Task, out: Path) -> None:
    """Change its files at the keeper, as a user with `exec` into that pod can."""
    signed = fetch(kubectl, out, name=task.name)
    shown = signed.stderr.splitlines()
    assert signed.returncode == 0, signed.stderr
    assert shown[0].startswith(f"{SITE}: signed by {SITE}'s keeper; "), signed.stderr
    assert sum(line.startswith(f"  {SITE}/") for line in shown) == len(CPU), signed.stderr
    brought = {path.name: path.read_bytes() for path in out.glob("model.*")}
    chosen = f"{names.COMPONENT_LABEL}={names.KEEPER},{names.JOB_LABEL}={task.name}"
    (keeper,) = kubectl.get("pods", "-l", chosen)["items"]
    for name in ("model.json", "model.keras"):
        kept = f"{names.STATE_DIR}/*/models/{SITE}/{name}"
        script = f"import glob; open(glob.glob('{kept}')[0], 'a').write(' ')"
        inside = (keeper["metadata"]["name"], "-c", names.KEEPER_CONTAINER, "--")
        kubectl.run("exec", *inside, "python", "-c", script)
        refused = fetch(kubectl, out, name=task.name)
        assert refused.returncode == ExitCode.DATA, refused.stderr
        assert f"{name} has SHA-256" in refused.stderr
        assert "one of them has been changed" in " ".join(refused.stderr.split())
        assert {path.name: path.read_bytes() for path in out.glob("model.*")} == brought


def progress(kubectl: Kubectl, task: Task) -> int:
    """Return the percentage of the way to the end in the status."""
    trainer = status_of(kubectl, task.name).get("trainerStatus") or {}
    return int(trainer.get("progressPercentage") or 0)


def accuracy(task: Task, *files: Path) -> float:
    """Return the accuracy of a saved model, evaluated only by Keras and TensorFlow; its other forms
    must agree.
    """
    lite = JUDGE_LITE if "tflite" in task.forms else ""
    code = f"import sys, keras, numpy{task.images}{JUDGE}{lite}\nprint(accuracy)"
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, files)],
        env=environment, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1])


def assert_shares(task: Task, results: Path) -> None:
    """Check shares of the batch, mean over the last half of each worker's steps."""
    steps = records(results, "step")
    limits = [cpu / sum(CPU.values()) for cpu in CPU.values()]
    shares, medians_s = [], []
    for rank in range(len(CPU)):
        own = [each for each in steps if each["rank"] == rank]
        late = own[len(own) // 2 :]
        parts = [each["local_batch_size"] / each["global_batch_size"] for each in late]
        shares.append(sum(parts) / len(parts))
        median_s = sorted(each["wall_s"] for each in late)[len(late) // 2]
        medians_s.append(median_s)
        print(f"worker {rank}: step of {median_s:.2f} s, batch {late[-1]['local_batch_size']}")
    print("shares of the batch:", *(f"{share:.3f}" for share in shares))
    print("shares of the limits:", *(f"{limit:.3f}" for limit in limits))
    if task.share_within is None:
        assert shares == sorted(shares, reverse=True)
    else:
        assert max(medians_s) <= LONGEST_STEP * min(medians_s)
        assert shares == pytest.approx(limits, rel=task.share_within)
