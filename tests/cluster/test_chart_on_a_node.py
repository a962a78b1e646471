"""The chart with the project's own operator image on a real node, with the rights that it grants.

Proves: `helm install --wait` comes to an end in namespaces that enforce `restricted`; `helm test`
passes; what the operator tells of itself is in docs/metrics.md; it acts on a job, and no request of
its account is forbidden, with a ClusterRole and with Roles alone.
Leaves out: what comes of the job (other tests of this folder); the images of workers.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from audit import Right, asked_by, refused, used
from chart import CHART, NAMESPACE, Helm, helm_program
from dlion_api.errors import UnavailableError
from manifest_table import smallest
from testbed.project_images import Target, build_images
from testbed.sites import Testbed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.kubectl import Kubectl
    from testbed.sites import Site

pytestmark = [pytest.mark.cluster, pytest.mark.root, pytest.mark.timeout(600)]

ACCOUNT = f"system:serviceaccount:{NAMESPACE}:dlion-operator"
DOCUMENT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


@pytest.fixture(scope="module")
def values(testbed_possible: None) -> dict[str, Any]:
    """The operator's image of the tree as it stands; those of workers are never fetched here."""
    assert testbed_possible is None
    (image,) = build_images([Target.OPERATOR])
    registry, _, name = image.reference.partition("/")
    repository, _, tag = name.partition(":")
    return {
        "site": {"name": "plant-a"},
        "images": {
            "registry": registry,
            "operator": {"repository": repository, "tag": tag},
            "pullPolicy": "Never",
        },
    }


@pytest.fixture(scope="module")
def site(values: dict[str, Any]) -> Iterator[Site]:
    """A site with a node that has the image, and two restricted namespaces."""
    assert values
    (image,) = build_images([Target.OPERATOR])
    with Testbed.up(name=f"h{time.time_ns() % 10**6}", sites=1, nodes=1,
                    images=[image.archive]) as made:  # fmt: skip
        site = made.site("site-a")
        for name in (NAMESPACE, "ml"):
            site.kubectl.run("create", "namespace", name)
            restricted = "pod-security.kubernetes.io/enforce=restricted"
            site.kubectl.run("label", "namespace", name, restricted)
        yield site


@pytest.fixture(scope="module")
def helm(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """helm with that site."""
    program = helm_program()
    assert program is not None
    return Helm(program, tmp_path_factory.mktemp("helm"), site.kubectl)


def install(helm: Helm, site: Site, values: dict[str, Any]) -> None:
    """Install the chart, or change what is installed; the operator runs when this is through."""
    try:
        helm.run("upgrade", "--install", "dlion", str(CHART), "-n", NAMESPACE, "--wait",
                 "--timeout", "100s", values=values)  # fmt: skip
    except UnavailableError as error:
        kubectl = replace(site.kubectl, namespace=NAMESPACE)
        pytest.fail(f"{error}\n{kubectl.run('logs', 'deployment/dlion-operator')[-4000:]}")


def state_of(kubectl: Kubectl, name: str) -> str:
    """What the operator says of a job."""
    return str(kubectl.get("dlionjob", name).get("status", {}).get("state", ""))


@pytest.mark.parametrize("namespaces", [[], ["ml"]], ids=["cluster", "namespaced"])
def test_the_operator_starts_and_acts_with_the_rights_that_it_is_given(
    helm: Helm, site: Site, values: dict[str, Any], namespaces: list[str]
) -> None:
    chosen = values | {"namespaces": namespaces}
    log = site.control_plane.audit_log
    before = len(asked_by(ACCOUNT, log))
    install(helm, site, chosen)
    assert "Succeeded" in helm.run("test", "dlion", "-n", NAMESPACE)
    kubectl = replace(site.kubectl, namespace="ml")
    name = f"job-{len(namespaces)}"
    document = smallest()
    document["metadata"] = {"name": name}
    document["spec"]["sites"][0]["name"] = "plant-a"
    kubectl.run("create", "-f", "-", text=json.dumps(document))
    deadline_s = time.monotonic() + 60
    while not (state_of(kubectl, name) and kubectl.get("jobs")["items"]):
        assert time.monotonic() < deadline_s, state_of(kubectl, name)
        time.sleep(0.5)
    asked = asked_by(ACCOUNT, log)[before:]
    assert refused(asked) == []
    assert Right("batch", "jobs", "create") in used(asked, "ml")
    kubectl.run("delete", "dlionjob", name)


def test_what_the_operator_tells_of_itself_is_documented(
    helm: Helm, site: Site, values: dict[str, Any]
) -> None:
    install(helm, site, values)
    where = f"/api/v1/namespaces/{NAMESPACE}/services/dlion-operator:metrics/proxy/metrics"
    text = site.kubectl.run("get", "--raw", where)
    told = set(re.findall(r"^# TYPE (dlion_\w+?)(?:_created)? ", text, re.MULTILINE))
    told = {name + "_total" if f"{name}_total" in text else name for name in told}
    documented = set(re.findall(r"^\| `(dlion_\w+)`", DOCUMENT, re.MULTILINE))
    assert "dlion_operator_loop_lag_seconds" in told
    assert told <= documented
