"""Test `dlion render`, which prints what an operator would create, without a cluster.

- The objects are those that an operator decides on for the job as an API server keeps it, except
  for values that only a cluster knows. Values of the chart apply.
- A program file is packed as with `dlion submit`. The output has the routes of a gateway. A site's
  runtime is the lowest layer and sets limits.
- An impossible job (another site, another controller, a violation of pod security, foreign values)
  is refused with its place. Comments name what is missing.

Left out: that an API server accepts the objects (tests/cluster), and that the chart reads the
values alike (tests/chart/test_values.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlion_cli.__main__ import main
from dlion_cli.inputs.chart_values import read_values, settings_of
from dlion_environments.yaml_text import parse_documents
from dlion_operator.plan.decisions import Apply, Create
from local_run import blobs, job_document
from operator_world import World, dlion_job

TWO = {"plant-a": 2, "plant-b": 1}


@pytest.fixture(autouse=True)
def without_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))


def write(folder: Path, document: object, name: str = "job.yaml") -> str:
    path = folder / name
    path.write_text(yaml.safe_dump(document))
    return str(path)


def rendered(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["render", *arguments]) == 0
    return [each for each in yaml.safe_load_all(capsys.readouterr().out) if each]


def kinds(objects: list[dict[str, Any]]) -> list[str]:
    return [each["kind"] for each in objects]


def test_objects_are_those_that_an_operator_decides_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = dlion_job({"small": 2, "large": 1})
    world = World({**stored, "metadata": {**stored["metadata"], "namespace": "ml"}})
    expected = [a.document for a in world.look().actions if isinstance(a, Apply | Create)]
    values = {
        "images": {"worker": {"repository": "dlion/worker", "tag": "1"},
                   "sidecar": {"repository": "dlion/sidecar", "tag": "1"}},
        "keeper": {"resources": {"requests": {"cpu": None, "memory": None},
                                 "limits": {"memory": None}}},
        "sidecar": {"resources": {"requests": {"cpu": None, "memory": None},
                                  "limits": {"memory": None}}},
        "networkPolicies": {"enabled": False},
    }  # fmt: skip
    manifest = {key: stored[key] for key in ("apiVersion", "kind", "spec")}
    manifest["metadata"] = {"name": "digits"}
    found = rendered(
        capsys, write(tmp_path, manifest), "-n", "ml", "--values", write(tmp_path, values, "v.yaml")
    )
    for each in expected:
        assert each["metadata"].pop("ownerReferences")
        if each["kind"] == "ConfigMap":
            assert each["data"].pop("ca.pem") == "PEM"
            uid = stored["metadata"]["uid"]
            assert f'"uid": "{uid}"' in each["data"]["pod.json"]
            each["data"]["pod.json"] = each["data"]["pod.json"].replace(uid, "")
    assert kinds(found) == ["ConfigMap", "Service", "Service", "Deployment", "Job", "Job"]
    assert found == expected


def test_a_run_id_that_looks_like_a_number_stays_a_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a short hash of Git: `kubectl` would refuse the number as a label."""
    job = write(tmp_path, job_document(2))
    assert main(["render", job, "--set", "runId=1234e56"]) == 0
    text = capsys.readouterr().out
    documents = parse_documents(text, source="rendered")
    labels = [document.value["metadata"]["labels"] for document in documents]
    assert {each["dlion.dev/run-id"] for each in labels} == {"1234e56"}


def test_json_is_one_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, job_document(1))
    objects = rendered(capsys, file)
    assert main(["render", file, "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["items"]) == ("List", objects)


def test_values_apply_to_the_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {
        "site": {"name": "plant-b"},
        "images": {"registry": "mirror:5000", "pullSecrets": ["harbor"]},
        "keeper": {"size": "2Gi", "storageClassName": "fast"},
        "monitoring": {"rules": {"enabled": True}},
    }
    file = write(tmp_path, job_document(TWO))
    given = write(tmp_path, values, "values.yaml")
    assert main(["render", file, "--values", given]) == 0
    text = capsys.readouterr().out
    assert "# Secret harbor: yours, of a registry\n" in text
    assert f"for site plant-b, with the values of {given}" in text
    objects = list(yaml.safe_load_all(text))
    claim = next(each for each in objects if each["kind"] == "PersistentVolumeClaim")
    assert claim["spec"]["storageClassName"] == "fast"
    (job,) = [each for each in objects if each["kind"] == "Job"]
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"].startswith("mirror:5000/dlion-worker:")
    assert pod["imagePullSecrets"] == [{"name": "harbor"}]
    assert job["spec"]["completions"] == 1


@pytest.mark.parametrize("null", [None, {"limits": None}, {"limits": {"memory": None}}])
def test_a_null_removes_the_charts_resources(tmp_path: Path, null: object) -> None:
    """As in Helm; the operator then sets none."""
    values = {"keeper": {"resources": null}, "sidecar": {"resources": null}}
    read = read_values(Path(write(tmp_path, values, "values.yaml")))
    settings = settings_of(read, "plant-a", source="")
    for found in (settings.keeper.resources, settings.sidecar.resources):
        assert found.limits == {}
        assert (found.requests == {}) == (null is None)


def test_a_gateway_has_its_routes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"gateway": {"address": "edge.example:443", "parent": {"name": "edge"}}}
    job = job_document(TWO, network={"exposure": "Gateway"})
    given = write(tmp_path, values, "values.yaml")
    objects = rendered(capsys, write(tmp_path, job), "--site", "plant-a", "--values", given)
    routes = [each for each in objects if each["kind"] == "TLSRoute"]
    assert len(routes) == 4, "two workers, two ports each"
    assert not any("ownerReferences" in each["metadata"] for each in objects)
    assert not any("uid" in each["metadata"] for each in objects)


def test_a_queued_job_has_its_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = job_document(1)
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "edge"}
    file = write(tmp_path, document)
    values = write(tmp_path, {"kueue": {"enabled": True}}, "v.yaml")
    objects = rendered(capsys, file, "--values", values)
    policies = ["NetworkPolicy", "NetworkPolicy"]
    assert kinds(objects) == ["Workload", *policies, "ConfigMap", "Service", "Service", "Job"]
    assert objects[0]["spec"]["queueName"] == "edge"
    assert "job-uid" not in str(objects[0])
    assert objects[-1]["spec"]["suspend"] is True
    assert main(["render", file]) == 0
    notes = capsys.readouterr().out
    assert "kueue.enabled is false" in notes
    assert "chart creates" not in notes, "the operator creates all objects of a run"


def test_a_program_file_is_packed_as_with_submit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blobs(tmp_path)
    job = job_document(1, trainer={"program": {"file": "program.py"}})
    assert main(["render", write(tmp_path, job)]) == 0
    text = capsys.readouterr().out
    program, *objects = yaml.safe_load_all(text)
    assert "def build_model" in program["data"]["program.py"]
    assert f"# `dlion submit` creates ConfigMap {program['metadata']['name']}" in text
    (made,) = [each for each in objects if each["kind"] == "Job"]
    volumes = made["spec"]["template"]["spec"]["volumes"]
    assert {"name": "program", "configMap": {"name": program["metadata"]["name"]}} in volumes


@pytest.mark.parametrize(
    ("changes", "kind", "comment"),
    [
        ({"suspend": True}, "Job", "spec.suspend is true"),
        ({"tls": {"mode": "Secret", "secretName": "mine"}}, "Job", "Secret mine: yours"),
        ({"tls": {"mode": "CertManager", "issuerName": "corp"}}, "Certificate", "cert-manager"),
        ({"network": {"exposure": "LoadBalancer"}}, "Service", "become LoadBalancers"),
    ],
)
def test_objects_of_other_components_are_comments(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    kind: str,
    comment: str,
) -> None:
    file = write(tmp_path, job_document(TWO, **changes))
    assert main(["render", file, "--site", "plant-a"]) == 0
    text = capsys.readouterr().out
    assert any(line.startswith("# ") and comment in line for line in text.splitlines())
    objects = list(yaml.safe_load_all(text))
    assert kind in kinds(objects)
    assert "Secret" not in kinds(objects)
    assert "BEGIN" not in text, "no certificate or key is invented"


RUNTIME = {
    "apiVersion": "dlion.dev/v1alpha1",
    "kind": "DLionRuntime",
    "metadata": {"name": "edge", "namespace": "dlion-system", "labels": {"a": "b"}},
    "spec": {"image": "site/worker:2", "limits": {"maxWorkers": 2}},
}


def test_a_runtime_is_the_layer_below_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, job_document(TWO, runtime="edge"))
    runtime = write(tmp_path, RUNTIME, "edge.yaml")
    objects = rendered(capsys, file, "--site", "plant-a", "--runtime", runtime)
    made = [each for each in objects if each["kind"] in ("Job", "Deployment")]
    pods = [each["spec"]["template"]["spec"] for each in made]
    assert {pod["containers"][0]["image"] for pod in pods} == {"site/worker:2"}
    assert main(["render", file, "--site", "plant-a"]) == 0
    assert "# DLionRuntime edge of the site is left out: give it by --runtime" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("name", "workers", "changes", "words"),
    [
        ("edge", 3, {}, "3 workers wanted, DLionRuntime edge allows 2"),
        ("other", 1, {}, "metadata.name"),
        ("", 1, {}, "neither spec.runtime nor runtimes.default names one"),
        ("edge", 1, {"kind": "DLionJob"}, "kind"),
        ("edge", 1, {"spec": {"limit": {}}}, "spec.limit"),
    ],
)
def test_a_runtime_that_does_not_fit_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    workers: int,
    changes: dict[str, Any],
    words: str,
) -> None:
    file = write(tmp_path, job_document({"plant-a": workers}, runtime=name))
    runtime = write(tmp_path, RUNTIME | changes, "edge.yaml")
    assert main(["render", file, "--runtime", runtime]) == 65
    assert words in capsys.readouterr().err


SECRET = {"spec": {"volumes": [{"name": "key", "secret": {"secretName": "db"}}]}}
PRIVILEGED = {
    "spec": {"containers": [{"name": "trainer", "securityContext": {"privileged": True}}]}
}


@pytest.mark.parametrize(
    ("spec", "options", "code", "words"),
    [
        ({}, [], 2, "has several sites: give --site plant-a or plant-b"),
        ({}, ["--site", "plant-c"], 65, "has no such site"),
        ({}, ["--site", "plant-a", "-n", "NOT valid"], 65, "namespace"),
        ({"managedBy": "example.com/other"}, ["--site", "plant-a"], 65, "spec.managedBy"),
        ({"podTemplate": PRIVILEGED}, ["--site", "plant-a"], 65, "violates pod security"),
        ({"podTemplate": SECRET}, ["--site", "plant-a"], 65, "volumes[key].secret: Secret db"),
        (
            {},
            ["--site", "plant-a", "-n", "kube-system"],
            65,
            "runs no jobs in namespace kube-system",
        ),
        ({"maxRestarts": -1}, ["--site", "plant-a"], 65, "spec.maxRestarts"),
    ],
)
def test_a_job_that_cannot_be_rendered_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spec: dict[str, Any],
    options: list[str],
    code: int,
    words: str,
) -> None:
    assert main(["render", write(tmp_path, job_document(TWO, **spec)), *options]) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert not captured.out


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (None, 66, "cannot be read"),
        ("a: [", 65, "values.yaml"),
        ("sites: 5", 65, "sites: must be a list"),
        ("tenancy: {excludedNamespaces: [[a]]}", 65, "tenancy.excludedNamespaces[0]"),
        ("tenancy: {excludedNamespaces: [{a: b}, 5]}", 65, "tenancy.excludedNamespaces[1]"),
        ("networkPolicies: {peerPorts: 5}", 65, "networkPolicies.peerPorts: must be a list"),
        ("gateway: {address: edge}", 65, "gateway.address"),
        ("[]", 65, "is not a mapping"),
        ("keeper: 7", 65, "keeper: is not a mapping"),
        ("a: 1\n---\nb: 2", 65, "several documents"),
        ("keeper: {size: 1Gi, claimName: x}", 65, "exclude each other"),
        ("keeper: {sizes: 1Gi}", 65, "keeper.sizes"),
        ("images: {pullPolicy: Sometimes}", 65, "images.pullPolicy"),
        ("coordinator: {port: 70000}", 65, "coordinator.port"),
        ("gateway: {address: edge.example:443}", 65, "parent.name"),
    ],
)
def test_foreign_values_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, code: int, words: str
) -> None:
    values = tmp_path / "values.yaml"
    if content is not None:
        values.write_text(content)
    file = write(tmp_path, job_document(1))
    assert main(["render", file, "--values", str(values)]) == code
    assert words in capsys.readouterr().err
