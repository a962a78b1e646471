"""Test a job on a cluster of two unequal, tainted nodes, with an image and a template for a group.

Without tolerations workers and keeper fit on no node, and the status reports it. After a correction
under the same runId, each group's workers run on their own kind of node, with their own image and
template. The keeper runs where the job's template places it, and all train together to the end. The
test prints where each pod runs. Left out: the pods of a template (tests/unit/operator/children),
the chart's values for keepers (tests/chart), images of another architecture and GPUs (nothing here
has any).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from testbed.project_images import Target
from trained_jobs import SITE, eventually, manifest, mostly_waiting, wait_until_trains

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.kubectl import Kubectl
    from testbed.project_images import ProjectImage
    from testbed.sites import Testbed

pytestmark = [pytest.mark.cluster, pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]
POOL = "dlion.test/pool"
POOLS = ("edge", "gpu")
OWN_IMAGE = "dlion.test/worker-gpu:1"
CLASS = "dlion-test"


@pytest.fixture
def pools(
    restricted: Kubectl,
    images: dict[Target, ProjectImage],
    testbed_alone: None,
    testbed: Testbed,
) -> Iterator[dict[str, str]]:
    """Taint the site's nodes by their pool; give the second one its own image."""
    nodes = testbed.site(SITE).nodes
    names = dict(zip(POOLS, (node.layout.name for node in nodes), strict=True))
    nodes[1].name_image(images[Target.WORKER].reference, OWN_IMAGE)
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "runc"}
    priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 7}
    restricted.apply(*(each | {"metadata": {"name": CLASS}} for each in (runtime, priority)))
    try:
        for pool, node in names.items():
            restricted.run("label", "node", node, f"{POOL}={pool}", "--overwrite")
            restricted.run("taint", "node", node, f"{POOL}={pool}:NoSchedule", "--overwrite")
        yield names
    finally:
        for node in names.values():
            restricted.run("taint", "node", node, f"{POOL}:NoSchedule-")
            restricted.run("label", "node", node, f"{POOL}-")
        restricted.run("delete", "runtimeclass,priorityclass", CLASS)


def tolerating(*pools: str) -> list[dict[str, str]]:
    return [{"key": POOL, "operator": "Equal", "value": each} for each in pools]


def pods(kubectl: Kubectl) -> dict[str, dict[str, Any]]:
    """Return each pod of the job by its group; the keeper has that name."""
    found = kubectl.get("pods", "-l", "dlion.dev/job-name=digits")["items"]
    there = [each for each in found if not each["metadata"].get("deletionTimestamp")]
    return {each["metadata"]["labels"].get("dlion.dev/group", "keeper"): each for each in there}


def test_groups_and_keeper_run_on_their_own_kinds_of_nodes(
    restricted: Kubectl, pools: dict[str, str]
) -> None:
    kubectl = restricted
    config_map, document = mostly_waiting(manifest({"small": 500, "gpu": 500}))
    kubectl.apply(config_map, document)
    kubectl.wait("--for=condition=Stalled", "dlj/digits", timeout_s=120)
    stalled = {c["type"]: c for c in kubectl.get("dlj", "digits")["status"]["conditions"]}
    assert stalled["Stalled"]["reason"] == "Unschedulable"
    assert "taint" in stalled["Stalled"]["message"]
    assert {name: pod["spec"].get("nodeName") for name, pod in pods(kubectl).items()} == {
        "small": None, "gpu": None, "keeper": None,
    }  # fmt: skip

    document["spec"]["podTemplate"] = {
        "metadata": {"labels": {"team": "edge"}, "annotations": {"example.org/note": "all"}},
        "spec": {"tolerations": tolerating("edge"), "priorityClassName": CLASS},
    }
    small, gpu = document["spec"]["sites"][0]["groups"]
    small["nodeSelector"] = {POOL: "edge"}
    gpu |= {
        "image": OWN_IMAGE,
        "nodeSelector": {POOL: "gpu"},
        "podTemplate": {
            "metadata": {"annotations": {"example.org/note": "gpu"}},
            "spec": {
                "runtimeClassName": CLASS,
                "tolerations": tolerating("gpu"),
                "containers": [{"name": "trainer", "env": [{"name": "POOL", "value": "gpu"}]}],
            },
        },
    }
    kubectl.apply(document)
    wait_until_trains(kubectl)
    there = eventually(lambda: found if len(found := pods(kubectl)) == 3 else None, what="pods")
    for name, pod in there.items():
        print(f"{name}: {pod['spec']['nodeName']}, {pod['spec']['containers'][0]['image']}")
    assert {name: pod["spec"]["nodeName"] for name, pod in there.items()} == {
        "small": pools["edge"], "gpu": pools["gpu"], "keeper": pools["edge"],
    }  # fmt: skip
    assert {name: pod["spec"].get("runtimeClassName") for name, pod in there.items()} == {
        "small": None, "gpu": CLASS, "keeper": None,
    }  # fmt: skip
    notes = {n: p["metadata"]["annotations"]["example.org/note"] for n, p in there.items()}
    assert notes == {"small": "all", "gpu": "gpu", "keeper": "all"}
    for pod in there.values():
        assert pod["metadata"]["labels"]["team"] == "edge"
        assert (pod["spec"]["priorityClassName"], pod["spec"]["priority"]) == (CLASS, 7)
    trainer = there["gpu"]["spec"]["containers"][0]
    assert trainer["image"] == OWN_IMAGE != there["small"]["spec"]["containers"][0]["image"]
    printed = kubectl.run("exec", there["gpu"]["metadata"]["name"], "-c", "trainer", "--", "env")
    assert "POOL=gpu" in printed.splitlines()
    kubectl.wait("--for=condition=Succeeded", "dlj/digits", timeout_s=300)
    wide = kubectl.run("get", "dlj", "-o", "wide").splitlines()
    print("\n".join(wide))
    columns = ["RUN", "POLICY", "LOSS", "ACCURACY", "ETA-SECONDS", "REASON"]
    assert wide[0].split()[-len(columns) :] == columns
