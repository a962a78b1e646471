"""Test how `dlion preflight -f` checks a site for a job: exposure, room, images.

A site without the gateway that the job needs fails. For every other exposure the dialled address is
reported. Machines that are too small for a job are named; all containers of its podTemplate count.
Quantities are read as Kubernetes reads them.

Left out: the requests (test_preflight_clusters.py).
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from dlion_api.spec.sites import Group, Resources
from dlion_cli.cluster.node_capacity import GroupCapacity, group_capacities
from dlion_cli.inputs.manifests import load_manifest
from dlion_cli.preflight_checks.checks import CheckOutcome
from dlion_cli.preflight_checks.site_capacity import capacity_checks
from dlion_cli.preflight_checks.site_cluster import OperatorSnapshot, SiteCluster
from dlion_operator.children.pods import resources_of
from dlion_operator.kubernetes.quantities import parse_quantity
from manifest_table import changed, smallest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlion_cli.preflight_checks.checks import Check

GATEWAY = {"address": "edge.example:443", "route": "TLSRoute"}


def checked(
    settings: dict[str, Any], nodes: list[Any] | None = None, **changes: Any
) -> dict[str, Check]:
    """Return the checks of the smallest job, changed in this way, at a site with these settings."""
    document = changed(smallest(), {f"spec.{name}": value for name, value in changes.items()})
    job = load_manifest(document, source="job", lines=None)
    operator = OperatorSnapshot(
        deployment={}, settings=settings, trust={}, service=None, streams={}
    )
    found = SiteCluster(
        context="a", namespace="dlion-system", version="", clock=None, schema={},
        operator=operator, nodes=nodes or [],
    )  # fmt: skip
    return {check.name: check for check in capacity_checks(found, job.spec.sites[0], job)}


# ---- exposure ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exposure", "settings", "outcome", "observed"),
    [
        ("Gateway", {}, CheckOutcome.FAIL, "has no gateway configured"),
        ("Gateway", {"gateway": None}, CheckOutcome.FAIL, "has no gateway configured"),
        ("Gateway", {"gateway": GATEWAY}, CheckOutcome.OK, "edge.example:443, routed by TLSRoutes"),
        (
            "PodNetwork",
            {"advertisedAddress": "x"},
            CheckOutcome.UNKNOWN,
            "its pods, at ports 7440 and 7441",
        ),
        (
            "NodePort",
            {"advertisedAddress": ""},
            CheckOutcome.UNKNOWN,
            "its nodes, at two node ports",
        ),
        (
            "NodePort",
            {"advertisedAddress": "x.example"},
            CheckOutcome.UNKNOWN,
            "connect to its x.example, at two",
        ),
        ("LoadBalancer", {}, CheckOutcome.UNKNOWN, "load balancers, at two ports"),
    ],
)
def test_the_exposure_of_workers_is_checked(
    exposure: str, settings: dict[str, Any], outcome: CheckOutcome, observed: str
) -> None:
    check = checked(settings, network={"exposure": exposure})["exposure"]
    assert (check.outcome, observed in check.observed) == (outcome, True), check
    assert bool(check.advice) == (outcome is not CheckOutcome.OK)


def test_a_job_of_one_site_needs_no_exposure() -> None:
    settings = {"gateway": None}
    sites = smallest()["spec"]["sites"][:1]
    assert "exposure" not in checked(settings, network={"exposure": "Gateway"}, sites=sites)


# ---- room ----------------------------------------------------------------------------------------


def node(labels: dict[str, str] | None = None, *, ready: str = "True", **more: Any) -> Any:
    conditions = [{"type": "Ready", "status": ready}]
    allocatable = {"cpu": "2", "memory": "4Gi", "nvidia.com/gpu": more.pop("gpus", "0")}
    return {
        "metadata": {"labels": labels or {}},
        "spec": more,
        "status": {"allocatable": allocatable, "conditions": conditions},
    }


def group(
    name: str, workers: int, selector: dict[str, str] | None = None, **requests: str
) -> Group:
    resources = Resources(requests={k.replace("_", "."): v for k, v in requests.items()})
    return Group(name=name, workers=workers, resources=resources, node_selector=selector or {})


def capacities(
    groups: Sequence[Group], nodes: list[Any], sidecar: dict[str, Any] | None = None, **pod: Any
) -> list[GroupCapacity]:
    """Return the capacity for these groups, with a sidecar and more fields of their pods."""
    pods = []
    for each in groups:
        parts = [{"resources": resources_of(each.resources)}, {"resources": sidecar or {}}]
        pods.append((each, {"containers": parts, "nodeSelector": each.node_selector, **pod}))
    return group_capacities(pods, nodes)


SIDECAR = {"requests": {"cpu": "100m"}, "limits": {"cpu": "1", "memory": "128Mi"}}
TAINTED = [{"key": "gpu", "effect": "NoSchedule"}]


@pytest.mark.parametrize(
    ("asked", "nodes", "placed", "reason"),
    [
        (group("g", 3, cpu="900m"), [node(), node()], 3, ""),
        (
            group("g", 5, cpu="900m"),
            [node(), node()],
            4,
            "",
        ),  # two workers of 0.9 + 0.1 on each node
        (group("g", 5, memory="2Gi"), [node(), node()], 2, ""),  # 2Gi and 128Mi each
        (group("g", 1, cpu="2"), [node()], 0, "requests cpu 2.1, no node has more than 2"),
        (group("g", 1, memory="5Gi"), [node()], 0, "requests memory 5248Mi, no node has more than"),
        (group("g", 1, {"size": "big"}), [node()], 0, "no node is ready"),
        (group("g", 1, {"size": "big"}), [node({"size": "big"})], 1, ""),
        (group("g", 1), [node(ready="False"), node(unschedulable=True)], 0, "no node is ready"),
        (group("g", 1), [node(taints=TAINTED)], 0, "no node is ready"),
        (group("g", 1), [], 0, "no node is ready"),
        (group("g", 1), [{"status": 7}], 0, "no node is ready"),
    ],
)
def test_the_room_for_workers_is_counted(
    asked: Group, nodes: list[Any], placed: int, reason: str
) -> None:
    (room,) = capacities((asked,), nodes, SIDECAR)
    assert (room.requested, room.placed) == (asked.workers, placed)
    assert (reason in room.reason) if reason else not room.reason


@pytest.mark.parametrize(
    ("workers", "cpu", "outcome"),
    [
        (4, "900m", CheckOutcome.OK),
        (5, "900m", CheckOutcome.WARN),
        (1, "3", CheckOutcome.FAIL),
    ],
)
def test_workers_without_room_are_a_warning(workers: int, cpu: str, outcome: CheckOutcome) -> None:
    groups = [{"name": "g", "workers": workers, "resources": {"requests": {"cpu": cpu}}}]
    sites = [{"name": "plant-a", "groups": groups}]
    check = checked({"sidecar": {"resources": SIDECAR}}, [node(), node()], sites=sites)["capacity"]
    assert check.outcome is outcome
    assert "capacity, ignoring other pods" in check.observed


CPU = {"resources": {"requests": {"cpu": "1500m"}}}


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": [{"name": "logs", **CPU}]},
        {"initContainers": [{"name": "logs", "restartPolicy": "Always", **CPU}]},
        {"initContainers": [{"name": "first", "resources": {"requests": {"cpu": "2500m"}}}]},
        {"initContainers": [{"name": "sidecar", **CPU}]},
        {"resources": {"requests": {"cpu": "2500m"}}},
    ],
)
def test_all_containers_of_a_template_count(spec: dict[str, Any]) -> None:
    resources = {"requests": {"cpu": "900m"}}
    groups = [{"name": "g", "workers": 1, "resources": resources}]
    sites = [{"name": "plant-a", "groups": groups}]
    settings = {"sidecar": {"resources": SIDECAR}}
    assert checked(settings, [node()], sites=sites)["capacity"].outcome is CheckOutcome.OK
    check = checked(settings, [node()], sites=sites, podTemplate={"spec": spec})["capacity"]
    assert check.outcome is CheckOutcome.FAIL
    assert "no node has more than 2" in check.observed


def test_a_job_that_tolerates_taints_may_use_tainted_nodes() -> None:
    for tolerations, placed in (([], 0), ([{"key": "gpu"}], 1)):
        (room,) = capacities((group("g", 1),), [node(taints=TAINTED)], tolerations=tolerations)
        assert room.placed == placed


@pytest.mark.parametrize("of", ["job", "group"])
def test_a_template_with_tolerations_may_use_tainted_nodes(of: str) -> None:
    template = {"spec": {"tolerations": [{"key": "gpu"}]}}
    groups: list[dict[str, Any]] = [{"name": "g", "workers": 1}, {"name": "h", "workers": 1}]
    changes: dict[str, Any] = {"sites": [{"name": "plant-a", "groups": groups}]}
    if of == "group":
        groups[1]["podTemplate"] = template
    else:
        changes["podTemplate"] = template
    check = checked({}, [node(taints=TAINTED)], **changes)["capacity"]
    tainted = "g 0 of 1 workers, h 1 of 1 workers"
    assert (tainted if of == "group" else "g 1 of 1 workers, h 1 of 1 workers") in check.observed


def test_templates_place_workers_as_the_operator_merges_them() -> None:
    """Selectors are merged, and null removes a label.

    A group's list of tolerations replaces the job's, also an empty one.
    """
    groups = [
        {"name": "any", "workers": 1, "podTemplate": {"spec": {"nodeSelector": {"disk": None}}}},
        {"name": "ssd", "workers": 1, "nodeSelector": {"size": "big"}},
        {"name": "own", "workers": 1, "nodeSelector": {"disk": "hdd"},
         "podTemplate": {"spec": {"nodeSelector": {"disk": "nvme"}, "tolerations": []}}},
        {"name": "odd", "workers": 1, "podTemplate": {"spec": {"nodeSelector": {"$patch": 7}}}},
    ]  # fmt: skip
    template = {"spec": {"nodeSelector": {"disk": "ssd"}, "tolerations": [{"operator": "Exists"}]}}
    sites = [{"name": "plant-a", "groups": groups}]

    def placed(labels: dict[str, str], **more: Any) -> str:
        check = checked({}, [node(labels, **more)], sites=sites, podTemplate=template)["capacity"]
        return " ".join(re.findall(r"(\w+) 1 of 1", check.observed))

    assert placed({"disk": "ssd"}) == "any odd"
    assert placed({"disk": "ssd", "size": "big"}) == "any ssd odd"
    assert placed({"disk": "nvme"}) == "any own"
    assert placed({"disk": "nvme"}, taints=TAINTED) == "any"


def test_groups_share_the_room() -> None:
    """The more demanding group is placed first, whatever its position."""
    found = capacities((group("small", 2, cpu="1"), group("big", 1, cpu="2")), [node(), node()])
    assert [(room.group, room.placed) for room in found] == [("small", 2), ("big", 1)]


def test_an_excessive_request_finds_no_room() -> None:
    (room,) = capacities((group("g", 1, cpu="1e99999999"),), [node()], SIDECAR)
    assert room.placed == 0
    assert "no node has more than 2" in room.reason


def test_a_node_has_room_for_as_many_pods_as_it_may_run() -> None:
    nodes = [node(), node()]
    for each in nodes:
        each["status"]["allocatable"]["pods"] = "2"
    (found,) = capacities((group("g", 5),), nodes)
    assert (found.placed, found.reason) == (4, "")


def test_a_node_that_may_run_no_pod_is_not_one_of_the_nodes() -> None:
    small, closed = node(), node()
    closed["status"]["allocatable"]["pods"] = "0"
    (room,) = capacities((group("g", 1),), [closed])
    assert room.reason.startswith("no node is ready")
    assert room.reason.endswith("may run pods")
    small["status"]["allocatable"]["cpu"] = "500m"
    (room,) = capacities((group("g", 1, cpu="1"),), [small, closed])
    assert room.reason == "a worker requests cpu 1, no node has more than 0.5"


def test_a_node_for_each_resource_is_no_node_for_a_worker() -> None:
    nodes = [node(), node()]
    nodes[0]["status"]["allocatable"] = {"cpu": "8", "memory": "1Gi"}
    nodes[1]["status"]["allocatable"] = {"cpu": "1", "memory": "16Gi"}
    (room,) = capacities((group("g", 1, cpu="4", memory="4Gi"),), nodes)
    assert room.placed == 0
    assert room.reason == "a worker requests cpu 4, memory 4096Mi, no node has all of it"


def test_a_request_never_looks_equal_to_what_is_less() -> None:
    small = node()
    small["status"]["allocatable"]["memory"] = "16383600Ki"
    (room,) = capacities((group("g", 1, memory="16000Mi"),), [small])
    assert room.reason == "a worker requests memory 16000Mi, no node has more than 15999Mi"


# ---- images --------------------------------------------------------------------------------------


def test_images_are_named_with_the_secrets_that_fetch_them() -> None:
    """A command that tests them needs all of these, and the fields of pod security."""
    images = {"worker": "w:1", "sidecar": "s:1", "pullSecrets": ["mirror"]}
    check = checked({"images": images})["images"]
    assert check.outcome is CheckOutcome.UNKNOWN
    assert check.observed.endswith(": w:1, s:1; Secrets of registries: mirror")
    assert "with these Secrets, in namespace default; otherwise" in check.advice
    assert "the job reports ImageUnavailable" in check.advice
    template = {"spec": {"imagePullSecrets": [{"name": "own"}]}}
    check = checked({"images": images}, podTemplate=template, **{"trainer.image": "own:2"})[
        "images"
    ]
    assert check.observed.endswith(": own:2, s:1; Secrets of registries: mirror, own")
    groups = [
        {"name": "small", "workers": 1},
        {
            "name": "gpu",
            "workers": 1,
            "image": "own:2-gpu",
            "podTemplate": {"spec": {"imagePullSecrets": [{"name": "private"}, {"name": "own"}]}},
        },
    ]
    sites = [{"name": "plant-a", "groups": groups}]
    check = checked({"images": images}, podTemplate=template, sites=sites)["images"]
    assert check.observed.endswith(
        ": w:1, own:2-gpu, s:1; Secrets of registries: mirror, own, private"
    )
    odd = {"spec": {"imagePullSecrets": 7}}
    check = checked({"images": images | {"pullSecrets": 7}}, podTemplate=odd)["images"]
    assert check.observed.endswith("registries: none")
    assert "pull all of them without a Secret;" in check.advice


# ---- quantities ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0), ("1", 1), ("2.5", "2.5"), (".5", "0.5"), ("100m", "0.1"), ("3k", 3000),
        ("1Ki", 1024), ("4Gi", 4 * 1024**3), ("2E", 2 * 10**18), ("1e3", 1000), ("1E3", 1000),
        ("-1", -1), ("5u", "0.000005"), ("7n", "7e-9"), ("1e99999999", 2**63 - 1),
    ],
)  # fmt: skip
def test_quantities_are_read_as_kubernetes_reads_them(text: str, number: int | str) -> None:
    assert parse_quantity(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "x", "1 Gi", "1KI", "1e1.5", "9" * 40, "NaN", "1e", "--1"])
def test_an_invalid_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)
