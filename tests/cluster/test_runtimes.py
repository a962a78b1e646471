"""Test DLionRuntimes with a real API server, an operator and no pods.

The API server accepts and refuses the same specs as the model, and sets defaults. A job waits for
its runtime, then for limits that allow it, and each time continues by itself. The objects of a
runtime are accepted, for workers and keeper. A run that has begun keeps its runtime, and the next
one uses the present runtime. In a cluster without the definition the operator reports that and runs
other jobs.

Left out: pods that run (tests/cluster/test_shaped_pods), the chart's rights (test_rights_in_use).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dlion_api.document import parse, to_document
from dlion_api.errors import UnavailableError
from dlion_api.spec import Runtime
from dlion_api.status import Reason
from fault_proxy import waited
from operator_process import OperatorProcess
from podless_jobs import manifest
from runtime_table import RUNTIME_CASES, runtime_document

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.kubectl import Kubectl

pytestmark = pytest.mark.cluster
DEFINITION = str(Path(__file__).parents[2] / "crds" / "dlionruntime.yaml")
TEMPLATE = {
    "metadata": {"labels": {"team": "site"}},
    "spec": {
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "edge", "operator": "Exists"}],
        "containers": [{"name": "trainer", "resources": {"limits": {"cpu": 1}}}],
    },
}


@pytest.fixture
def operator(kubectl: Kubectl, tmp_path: Path) -> Iterator[OperatorProcess]:
    home = kubectl.namespace
    with OperatorProcess(
        tmp_path, kubectl.kubeconfig, namespaces=(home,), namespace=home
    ) as process:
        yield process
        assert process.metric('dlion_operator_reconciles_total{result="defect"}') == 0


@pytest.fixture
def defined(kubectl: Kubectl) -> Kubectl:
    """The same with the definition installed."""
    kubectl.run("apply", "-f", DEFINITION)
    kubectl.wait_until_known("dlr")
    return kubectl


def ready(kubectl: Kubectl) -> tuple[str, str]:
    """Return reason and message."""
    conditions = (kubectl.get("dlj", "digits").get("status") or {}).get("conditions") or ()
    found = next((each for each in conditions if each["type"] == "Ready"), {})
    return str(found.get("reason", "")), str(found.get("message", ""))


def until_ready(kubectl: Kubectl, reason: str, words: str = "") -> str:
    def there() -> bool:
        found = ready(kubectl)
        return found[0] == reason and words in found[1]

    assert waited(there, 30), ready(kubectl)
    return ready(kubectl)[1]


def made(kubectl: Kubectl, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = kubectl.get(kind, "-l", "dlion.dev/job-name=digits")["items"]
    return found


def images(kubectl: Kubectl, kind: str = "jobs") -> set[str]:
    pods = [each["spec"]["template"]["spec"] for each in made(kubectl, kind)]
    return {pod["containers"][0]["image"] for pod in pods}


@pytest.mark.usefixtures("operator")
def test_an_operator_with_an_older_definition_reports_it(kubectl: Kubectl) -> None:
    kubectl.run("delete", "--ignore-not-found", "-f", DEFINITION)
    kubectl.apply(manifest(runtime="edge"))
    until_ready(kubectl, "RuntimeUnavailable", "apply crds/dlionruntime.yaml")
    kubectl.run("apply", "-f", DEFINITION)
    kubectl.wait_until_known("dlr")
    until_ready(kubectl, "RuntimeUnavailable", "does not exist at this site")


def test_the_api_server_judges_runtimes_as_the_model_does(defined: Kubectl) -> None:
    for number, case in enumerate(RUNTIME_CASES):
        document = runtime_document(case.spec, f"case-{number}")
        if not case.blamed:
            defined.apply(document)
            stored = defined.get("dlr", document["metadata"]["name"])
            wanted = parse(Runtime, document)
            assert parse(Runtime, {**document, "spec": stored["spec"]}) == wanted, case.name
            assert stored["spec"].keys() == to_document(wanted)["spec"].keys(), case.name
            continue
        with pytest.raises(UnavailableError) as error:
            defined.apply(document)
        assert case.blamed in str(error.value), case.name
    printed = defined.run("get", "dlr", "case-0").splitlines()
    assert printed[0].split() == ["NAME", "IMAGE", "WORKERS", "RESOURCES", "AGE"]
    assert "may use" in defined.run("explain", "dlionruntime.spec.limits.maxResources")


@pytest.mark.usefixtures("operator")
def test_a_job_waits_for_its_runtime_and_its_limits(
    defined: Kubectl,
) -> None:
    kubectl = defined
    kubectl.apply(manifest(small=3, runtime="edge"))
    message = until_ready(kubectl, "RuntimeUnavailable", "does not exist at this site")
    assert f"kubectl -n {kubectl.namespace} get dlionruntimes" in message
    assert not made(kubectl, "jobs,deployments,configmaps,services")

    spec: dict[str, Any] = {"image": "site/worker:1", "podTemplate": TEMPLATE}
    limits = {"maxWorkers": 3, "maxResources": {"cpu": 1, "memory": "1Gi"}, "mayOverride": []}
    kubectl.apply(runtime_document(spec | {"limits": limits}))
    message = until_ready(kubectl, "RuntimeLimitExceeded", "4 workers wanted")
    assert "container trainer of group small has no limit of memory" in message
    assert not made(kubectl, "jobs,deployments")

    kubectl.apply(runtime_document(spec | {"limits": {"maxWorkers": 4}}))
    until_ready(kubectl, "WorkersStarting")
    assert images(kubectl) == images(kubectl, "deployments") == {"site/worker:1"}
    for job in made(kubectl, "jobs"):
        pod = job["spec"]["template"]
        assert pod["metadata"]["labels"]["team"] == "site"
        assert pod["spec"]["nodeSelector"] == {"disk": "ssd"}
        assert pod["spec"]["containers"][0]["resources"]["limits"] == {"cpu": "1"}
    (keeper,) = made(kubectl, "deployments")
    assert keeper["spec"]["template"]["spec"]["nodeSelector"] == {"disk": "ssd"}

    events = kubectl.get("events", "--field-selector=involvedObject.name=digits")["items"]
    reasons = [each["reason"] for each in events if each["reason"].startswith("Runtime")]
    assert set(reasons) == {Reason.RUNTIME_UNAVAILABLE, Reason.RUNTIME_LIMIT_EXCEEDED}


@pytest.mark.usefixtures("operator")
def test_a_run_keeps_its_runtime_and_the_next_uses_the_present_one(defined: Kubectl) -> None:
    kubectl = defined
    kubectl.apply(runtime_document({"image": "site/worker:1", "limits": {"maxWorkers": 4}}))
    kubectl.apply(manifest(small=2, runtime="edge"))
    until_ready(kubectl, "WorkersStarting")
    kubectl.apply(runtime_document({"image": "site/worker:2", "limits": {"maxWorkers": 2}}))
    (small,) = (each for each in made(kubectl, "jobs") if each["spec"]["parallelism"] == 2)
    kubectl.run("delete", "job", small["metadata"]["name"], "--wait=true")
    assert waited(lambda: len(made(kubectl, "jobs")) == 2, 20)
    assert images(kubectl) == {"site/worker:1"}

    kubectl.apply(manifest(small=5, runtime="edge"))
    until_ready(kubectl, ready(kubectl)[0], "6 workers wanted, DLionRuntime edge allows 4")
    assert {each["spec"]["parallelism"] for each in made(kubectl, "jobs")} == {1, 2}

    kubectl.apply(manifest(small=1, runtime="edge", runId="2"))
    assert waited(lambda: images(kubectl) == {"site/worker:2"}, 30), ready(kubectl)


@pytest.mark.usefixtures("operator")
def test_a_corrected_runtime_is_used_at_once(defined: Kubectl) -> None:
    kubectl = defined
    bad = {"podTemplate": {"spec": {"containers": [{"name": "trainer", "env": "none"}]}}}
    kubectl.apply(runtime_document(bad))
    kubectl.apply(manifest(runtime="edge"))
    until_ready(kubectl, "InvalidSpec")
    kubectl.apply(runtime_document({"image": "site/worker:3"}))
    until_ready(kubectl, "WorkersStarting")
    assert images(kubectl) == {"site/worker:3"}
