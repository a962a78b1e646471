"""A job of workers with CPU limits of 4:2:1, from `kubectl apply` to the model.

Proves: three groups with hard limits train together from images of this tree; their shares of the
batch follow what each gets (in `make slow`: its limit); `kubectl wait` sees the end; the fetched
model, judged by Keras alone on images that the job was not trained on, knows them, and says the
same as SavedModel (in `make slow`: as TensorFlow Lite, too), loaded by TensorFlow alone; its keeper
has signed whose updates it holds, and `fetch` refuses a model or description that was changed
later, without changing what it brought before; deleting leaves nothing;
kstatus, Flux and Argo CD say of it what docs/conditions.md says. In `make test` the job is
`digits`, a model so small that what a step costs whatever its batch weighs: there shares only keep
the limits' order. In `make slow` it is `cipher` on CIFAR-10 as well, where ../shared/data/cifar10
is at hand and the nodes are the testbed's: its steps are as long for each worker, too. Prints what
`kubectl get dlj` shows, the shares and the time to each worker's first step.
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
"""Times the shortest worker's step."""
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
"""What `dlion fetch --format` makes of a model."""


@dataclass(frozen=True)
class Task:
    """What is learnt: the manifest, Python that gives images `x` and labels `y`, and the bars."""

    document: dict[str, Any]
    images: str
    least_accuracy: float
    share_within: float | None
    """Of the limits' own shares, relative, and steps of one length; None: only in their order."""
    forms: tuple[str, ...]
    """In which the model is fetched, too: tests/unit/worker/training has each of a small one."""

    @property
    def name(self) -> str:
        return str(self.document["metadata"]["name"])


@pytest.fixture(params=["digits", pytest.param("cifar10", marks=pytest.mark.slow)])
def task(
    other_cluster: Kubectl | None, restricted: Kubectl, request: pytest.FixtureRequest
) -> Task:
    """The digits, or CIFAR-10 on the nodes of the testbed's first site, where its files are.

    Beside other tests the largest worker may not get its limit: cgroups weigh groups of processes,
    and `nice` counts only inside one. So shares are held against the limits in `make slow`.
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
        "evaluation": {"everySamples": 15_000, "maxSamples": 500},
        "stop": {"maxSteps": 50},
    }
    document["spec"]["batching"]["globalBatchSize"] = {"initial": 960, "growth": False}
    return Task(guaranteed(document), PHOTOS, 0.3, 0.1, tuple(FORMS))


def guaranteed(document: dict[str, Any]) -> dict[str, Any]:
    """That manifest with groups that request their limits: where the machine has too little for
    all, it goes to them in the same proportions."""
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
    print(f"has ended and is fetched {time.monotonic() - applied_s:.0f} s after kubectl apply")
    forms = [
        fetched(kubectl, tmp_path / form, "--format", form, name=task.name) / FORMS[form]
        for form in task.forms
    ]
    known = accuracy(task, model / "model.keras", *forms)
    print(f"accuracy of the fetched model on other images: {known:.1%}")
    assert known >= task.least_accuracy
    assert_shares(task, results)
    assert_signed(kubectl, task, model)
    kubectl.run("delete", job, "--wait=true")
    chosen = f"dlion.dev/job-name={task.name}"
    eventually(lambda: not kubectl.get(KINDS, "-l", chosen)["items"], what="nothing left")


def assert_signed(kubectl: Kubectl, task: Task, out: Path) -> None:
    """Its files at the keeper are changed as anybody can who may `exec` into that pod."""
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
    """Percent of the way to the end, as the status has it."""
    trainer = status_of(kubectl, task.name).get("trainerStatus") or {}
    return int(trainer.get("progressPercentage") or 0)


def accuracy(task: Task, *files: Path) -> float:
    """Of a saved model, judged by Keras and TensorFlow alone, which have nothing of ours; its other
    forms must say the same."""
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
    """Of the batch, mean over the last half of each worker's steps."""
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
