"""Test how the operator reacts when its objects are changed or deleted, with a real API server.

A child that loses our label gets it back and the run continues, also if the label is restored at
once. A deleted keeper's Deployment or run's ConfigMap is created again within seconds, and the
first causes an event.

Left out: pods that run; which objects are never changed (tests/unit/operator/test_owned_objects).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlion_api.cluster_names import JOB_LABEL
from fault_proxy import waited
from operator_process import OperatorProcess
from podless_jobs import children, manifest, settled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.kubectl import Kubectl

pytestmark = pytest.mark.cluster


@pytest.fixture
def operator(kubectl: Kubectl, tmp_path: Path) -> Iterator[OperatorProcess]:
    home = kubectl.namespace
    with OperatorProcess(
        tmp_path, kubectl.kubeconfig, namespaces=(home,), namespace=home
    ) as process:
        yield process
        assert process.metric('dlion_operator_reconciles_total{result="defect"}') == 0


@pytest.mark.usefixtures("operator")
@pytest.mark.parametrize("is_put_back", [False, True])
def test_a_job_without_its_label_stays_with_the_operator(
    kubectl: Kubectl, *, is_put_back: bool
) -> None:
    kubectl.apply(manifest())
    there = settled(kubectl, pods=3)
    (name,) = (each.partition("/")[2] for each in there if each.startswith("Job/digits-small"))
    uid = kubectl.get("job", name)["metadata"]["uid"]
    kubectl.run("label", "job", name, f"{JOB_LABEL}-")
    if is_put_back:
        kubectl.run("label", "job", name, f"{JOB_LABEL}=digits", "--overwrite")
    assert waited(lambda: children(kubectl) == there, 20), children(kubectl)
    kubectl.apply(manifest(small=3))  # the operator must find the Job for that
    assert waited(lambda: kubectl.get("job", name)["spec"]["parallelism"] == 3, 20)
    assert kubectl.get("job", name)["metadata"]["uid"] == uid
    assert reasons(kubectl).count("WorkersCreated") == 2


@pytest.mark.usefixtures("operator")
@pytest.mark.parametrize("kind", ["Deployment", "ConfigMap"])
def test_deleted_objects_of_a_run_are_created_again(kubectl: Kubectl, kind: str) -> None:
    kubectl.apply(manifest())
    there = settled(kubectl, pods=3)
    (name,) = (each.partition("/")[2] for each in there if each.startswith(f"{kind}/"))
    uid = kubectl.get(kind, name)["metadata"]["uid"]
    kubectl.run("delete", kind, name, "--wait=true")
    chosen = (kind, "-l", f"{JOB_LABEL}=digits")
    assert waited(lambda: bool(kubectl.get(*chosen)["items"]), 10)
    assert kubectl.get(kind, name)["metadata"]["uid"] != uid
    if kind == "Deployment":
        assert waited(lambda: len(created_keepers(kubectl)) == 2, 10)


def reasons(kubectl: Kubectl) -> list[str]:
    """Return the reasons of all events of the job."""
    events = kubectl.get("events", "--field-selector=involvedObject.name=digits")["items"]
    return [each["reason"] for each in events]


def created_keepers(kubectl: Kubectl) -> list[str]:
    return [each for each in reasons(kubectl) if each == "KeeperCreated"]
