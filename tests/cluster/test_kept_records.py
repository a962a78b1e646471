"""Test the records of runs whose pods and events are gone, in a real cluster.

The operator is of this tree. A job failed and then lost its workers' pods and all events. `dlion
logs` still prints the traceback, `events` the failure and `describe` its figures. Without a claim
they are lost with the keeper's pod. `fetch` gets the logs, which `dlion logs DIR` prints. For a job
that is suspended and resumed, the keeper has the logs of both pods. Metrics of a program's
`compile()` are in the status. With all records they are in the Python client's data frame after the
workers' pods are gone. After ttlSecondsAfterFinished the commands report what is gone. The pod in
docs/keeper.md then reads the claim for `fetch`, `logs`, `events` and `describe`.

Left out: bounds and hostile input (tests/local/test_kept_logs.py, tests/unit/cli).
"""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

import dlion as dlion_python
from dlion_api import cluster_names as names
from dlion_api.exit_codes import ExitCode
from dlion_cli.__main__ import main
from dlion_worker.sidecar.log_upload import NEXT_POD
from testbed.project_images import Target
from trained_jobs import (
    SITE,
    eventually,
    fetched,
    iteration,
    manifest,
    mostly_waiting,
    restricted_namespace,
    wait_until_trains,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from testbed.kubectl import Kubectl
    from testbed.project_images import ProjectImage
    from testbed.sites import Testbed

pytestmark = [pytest.mark.cluster, pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = Path(__file__).parents[2] / "docs" / "keeper.md"
WORKERS = f"{names.COMPONENT_LABEL}={names.WORKER}"
RAISES = """
def build_model():
    raise ValueError("no such layer: convolution3")
def load_data():
    raise AssertionError("is never asked")
"""
TTL_S = 90


@pytest.fixture
def site(operated_site: Kubectl) -> Iterator[Kubectl]:
    with restricted_namespace(operated_site) as kubectl:
        yield kubectl


@pytest.fixture
def dlion(site: Kubectl, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run a command there; return its code and all its output."""

    def run(*arguments: str) -> tuple[int, str]:
        where = ["--kubeconfig", str(site.kubeconfig), "-n", site.namespace]
        capsys.readouterr()
        code = main([*arguments, *where])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def failing(**spec: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a ConfigMap with a program that raises, and a job with it."""
    document = manifest({"a": 500}, **spec)
    document["spec"]["trainer"]["program"] = {"configMap": {"name": "mine", "key": "job.py"}}
    config_map = {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mine"},
        "data": {"job.py": RAISES},
    }  # fmt: skip
    return config_map, document


def reading_pod(image: str, claim: str) -> dict[str, Any]:
    """Return the pod on the page, with that image and claim."""
    (block,) = re.findall(
        r"```yaml\n(apiVersion: v1\nkind: Pod\n.*?)```", PAGE.read_text(), re.DOTALL
    )
    document: dict[str, Any] = yaml.safe_load(block)
    document["metadata"]["labels"][names.SITE_LABEL] = SITE
    (container,) = document["spec"]["containers"]
    container["image"] = image
    (volume,) = document["spec"]["volumes"]
    assert volume["persistentVolumeClaim"] == {"claimName": "digits-keeper"}
    volume["persistentVolumeClaim"]["claimName"] = claim
    return document


def on_claim(testbed: Testbed, kubectl: Kubectl, results: Path, claim: str) -> None:
    """Put that folder as run 1 on a claim: a disk that every node of the site has."""
    nodes = testbed.site(SITE).nodes
    for node in nodes:
        shutil.copytree(results, node.machine.folder / "lib" / f"{kubectl.namespace}-{claim}" / "1")
    here = {"key": "kubernetes.io/hostname", "operator": "In",
             "values": [node.layout.name for node in nodes]}  # fmt: skip
    terms = [{"matchExpressions": [here]}]
    shared = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}
    size = {"storage": "1Gi"}
    volume = f"{kubectl.namespace}-{claim}"
    kubectl.apply(
        {
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume},
            "spec": shared | {
                "capacity": size, "local": {"path": f"/var/lib/{volume}"},
                "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
                "claimRef": {"namespace": kubectl.namespace, "name": claim},
            },
        },
        {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": claim},
            "spec": shared | {"volumeName": volume, "resources": {"requests": size}},
        },
    )  # fmt: skip


def test_a_failed_run_is_explained_without_its_pods_events_and_keeper(
    site: Kubectl,
    dlion: Callable[..., tuple[int, str]],
    images: dict[Target, ProjectImage],
    other_cluster: Kubectl | None,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    site.apply(*failing(ttlSecondsAfterFinished=TTL_S))
    site.wait("--for=condition=Failed", "dlj/digits", timeout_s=180)
    site.run("delete", "pods", "-l", WORKERS, timeout_s=60)
    site.run("delete", "events", "--all")

    code, printed = dlion("logs", "digits")
    assert (code, "ValueError: no such layer: convolution3" in printed) == (0, True), printed
    assert "dlion: pods are gone: the keeper has the ends of their logs" in printed
    with dlion_python.Client(
        "kubernetes", kubeconfig=str(site.kubeconfig), namespace=site.namespace
    ) as client:
        assert "ValueError: no such layer: convolution3" in "\n".join(client.get_job_logs("digits"))
        assert [*client.get_job_metrics("digits")["iteration"]] == [], "it made no step"
    code, printed = dlion("events", "digits")
    assert (code, "ProgramFailed" in printed, "these are the keeper's" in printed) == (
        0, True, True
    ), printed  # fmt: skip
    code, printed = dlion("describe", "digits")
    assert code == 0
    assert "convolution3" in printed
    assert "lost with the keeper's pod" in " ".join(printed.split())
    results = fetched(site, tmp_path / "results", "--all")
    code = main(["logs", str(results)])
    assert code == 0
    assert (results / "logs/worker-0.log").read_text().count("Traceback") >= 1

    eventually(
        lambda: not site.get("pods")["items"], within_s=TTL_S + 90, what="the keeper is gone"
    )
    for command in (["logs", "digits"], ["fetch", "digits"], ["events", "digits", "--run", "1"]):
        code, printed = dlion(*command)
        assert code == ExitCode.UNAVAILABLE
        assert "has no keeper pod here" in printed
        assert "docs/keeper.md, Reading the claim" in printed
    assert "Without figures of the run: digits has no keeper" in " ".join(
        dlion("describe", "digits")[1].split()
    )
    if other_cluster is not None:
        pytest.skip("the claim needs a disk of the testbed's nodes")
    on_claim(request.getfixturevalue("testbed"), site, results, "digits-keeper")
    site.apply(reading_pod(images[Target.WORKER].reference, "digits-keeper"))
    site.wait("--for=condition=Ready", "pod/digits-records", timeout_s=120)
    again = fetched(site, tmp_path / "again", "--all")
    assert (again / "events.jsonl").read_bytes() == (results / "events.jsonl").read_bytes()
    code, printed = dlion("logs", "digits")
    assert (code, "ValueError: no such layer: convolution3" in printed) == (0, True), printed
    code, printed = dlion("events", "digits", "--run", "1")
    assert (code, "ProgramFailed" in printed) == (0, True), printed
    assert "Without figures" not in dlion("describe", "digits")[1]


def test_logs_of_a_suspended_job_and_of_both_its_pods_are_kept(
    site: Kubectl, dlion: Callable[..., tuple[int, str]]
) -> None:
    config_map, document = mostly_waiting(manifest({"a": 500}))
    document["spec"]["trainer"]["stop"] = {"maxSeconds": 600}
    site.apply(config_map, document)
    wait_until_trains(site)
    assert dlion("suspend", "digits", "--wait")[0] == 0
    eventually(
        lambda: not site.get("pods", "-l", WORKERS)["items"], within_s=90, what="no worker's pod"
    )
    code, printed = dlion("logs", "digits")
    assert (code, '"supervisor": "started"' in printed) == (0, True), printed
    assert NEXT_POD.decode() not in printed
    trained = iteration(site)
    assert dlion("resume", "digits")[0] == 0
    wait_until_trains(site)
    eventually(lambda: iteration(site) > trained, what="trains on")

    def has_both() -> bool:
        code, printed = dlion("logs", "digits", "--run", "1")
        assert code == 0, printed
        before, next_pod, after = printed.partition(NEXT_POD.decode().strip())
        return bool(next_pod) and all("supervisor" in each for each in (before, after))

    eventually(has_both, within_s=90, what="logs of both pods")
    lost = site.get("pods", "-l", WORKERS)["items"][0]["metadata"]["name"]
    assert "the next pod" not in dlion("logs", "digits")[1], "its pod exists"
    site.run("delete", "pod", lost, timeout_s=60)
    eventually(partial(three_lives, dlion), within_s=120, what="the log of the deleted pod")


METRICS = """
def build_model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    top = keras.metrics.SparseTopKCategoricalAccuracy(k=2, name="top")
    model.compile("sgd", loss, metrics=["accuracy", top])
    return model

def load_data(split, site, worker_index):
    x = numpy.random.default_rng(1).normal(size=(400, 2)).astype("float32")
    return x, (x[:, 0] > 0).astype("int64")
"""


def test_metrics_of_a_program_are_in_the_status_and_with_the_keeper(site: Kubectl) -> None:
    """The status has those of `compile()`; the records remain after the workers' pods are gone."""
    config_map, document = failing()
    config_map["data"]["job.py"] = f"import keras\nimport numpy\n{METRICS}"
    del document["spec"]["trainer"]["dataset"]
    document["spec"]["trainer"]["stop"] = {"maxSteps": 40}
    site.apply(config_map, document)
    site.wait("--for=condition=Succeeded", "dlj/digits", timeout_s=240)
    site.run("delete", "pods", "-l", WORKERS, timeout_s=60)
    with dlion_python.Client(
        "kubernetes", kubeconfig=str(site.kubeconfig), namespace=site.namespace
    ) as client:
        job, frame = client.get_job("digits"), client.get_job_metrics("digits")
    assert job.metrics == {"top": 1.0}, "one of two is always among two"
    assert frame["iteration"].max() == 40
    assert frame["top"].dropna().iloc[-1] == 1.0
    assert frame["accuracy"].dropna().iloc[-1] == pytest.approx(job.accuracy, abs=1e-3)
    assert set(frame["site"]) == {SITE}


def three_lives(dlion: Callable[..., tuple[int, str]]) -> bool:
    """Report whether the keeper has the output of three pods of a worker."""
    return dlion("logs", "digits", "--run", "1")[1].count(NEXT_POD.decode().strip()) == 2
