"""Test when the operator deletes a pod by force.

- It does so only if the pod's node is missing or not ready, or if the pod never had one. If nodes
  may not be read, it does so after Kubernetes has given up the node, or after the longer time
  limit.
- It reads a node only for an overdue pod, each time again, and never as an operator of some
  namespaces.
- A ready node keeps its pod, also that of a keeper. The job's events report this once.

Left out: nodes that fail (tests/cluster/test_training_on_a_dead_node.py).
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from dlion_api.cluster_names import COMPONENT_LABEL, KEEPER
from dlion_operator.kubernetes.client import Document, Kind, RequestRefusedError, ServerError
from dlion_operator.plan.decisions import Delete
from dlion_operator.plan.node_states import NodeState
from dlion_operator.plan.objects.garbage_collection import (
    CLEANUP_TIMEOUT_S,
    LOST_AFTER_S,
    release_lost_pods,
)
from dlion_operator.plan.observed import PodView, TerminatingPods
from operator_in_memory import Site
from operator_world import SETTINGS, dlion_job

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
SHORT_S, LONG_S = 30 + LOST_AFTER_S + 1, 30 + CLEANUP_TIMEOUT_S + 1
GIVEN_UP = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
EVICTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
READY = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
UNKNOWN = {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}


def pod(*, node: str = "n1", conditions: list[dict[str, str]] | None = None) -> Document:
    return {
        "metadata": {"name": "p", "uid": "u", "deletionGracePeriodSeconds": 30},
        "spec": {"nodeName": node} if node else {},
        "status": {"phase": "Running", "conditions": conditions or []},
    }


CASES: dict[str, tuple[Document, float, NodeState | None, bool]] = {
    "its node is gone": (pod(), SHORT_S, NodeState.ABSENT, True),
    "its node is not ready": (pod(), SHORT_S, NodeState.NOT_READY, True),
    "its node is ready": (pod(), SHORT_S, NodeState.READY, False),
    "its node is ready for long": (pod(), LONG_S, NodeState.READY, False),
    "ready though given up": (pod(conditions=[GIVEN_UP]), LONG_S, NodeState.READY, False),
    "no kubelet answers": (pod(), LONG_S, NodeState.UNANSWERED, False),
    "it never had a node": (pod(node=""), SHORT_S, None, True),
    "no right": (pod(), SHORT_S, NodeState.FORBIDDEN, False),
    "no right, given up": (pod(conditions=[GIVEN_UP]), SHORT_S, NodeState.FORBIDDEN, True),
    "no right, evicted": (pod(conditions=[EVICTED]), SHORT_S, NodeState.FORBIDDEN, False),
    "no right, for long": (pod(), LONG_S, NodeState.FORBIDDEN, True),
    "too early": (pod(), 30 + LOST_AFTER_S, NodeState.ABSENT, False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_pod_is_released_only_if_it_cannot_run(name: str) -> None:
    document, waited_s, state, expected = CASES[name]
    nodes = {} if state is None else {"n1": state}
    terminating = TerminatingPods([document], {"u": waited_s}, nodes)
    actions = list(release_lost_pods(terminating, NOW))
    assert (len(actions) == 2) == bool(actions) == expected


def test_the_next_operator_deletes_a_pod_that_an_earlier_one_marked() -> None:
    """It may not read nodes, and the mark has replaced the cluster's condition."""
    marked = pod(conditions=[GIVEN_UP])
    marked["status"] |= PodView(marked).node_lost_status(NOW)
    terminating = TerminatingPods([marked], {"u": SHORT_S}, {"n1": NodeState.FORBIDDEN})
    assert list(release_lost_pods(terminating, NOW)) == [Delete(Kind.POD, "p", "u", grace_s=0)]


def leaving_site(component: str = "", **settings: Any) -> Site:
    """Return a job with a pod of that component that waits for its release by node n1."""
    site = Site(dlion_job({"small": 1}), settings=replace(SETTINGS, **settings))
    site.look()
    site.start_pods()
    is_keeper = component == KEEPER
    found = next(
        each
        for each in site.store.all(Kind.POD)
        if (each["metadata"]["labels"].get(COMPONENT_LABEL) == KEEPER) == is_keeper
    )
    marks = {"deletionTimestamp": "2026-01-31T11:00:00Z", "deletionGracePeriodSeconds": 30,
             "resourceVersion": "5000"}  # fmt: skip
    site.store.put(
        Kind.POD,
        {**found, "metadata": found["metadata"] | marks, "spec": {"nodeName": "n1"}},
    )
    return site


def looked_at_late(site: Site) -> list[tuple[str, str]]:
    """Return the requests of a look when the pod is overdue."""
    site.look()
    assert ("get", "NODE") not in site.cluster.requests
    site.time_s = SHORT_S
    site.look()
    return site.cluster.requests


@pytest.mark.parametrize("component", ["", KEEPER])
def test_a_ready_node_keeps_its_pod_and_one_event_reports_it(component: str) -> None:
    site = leaving_site(component)
    site.cluster.objects[Kind.NODE, "n1"] = dict(READY)
    requests = looked_at_late(site)
    assert requests.count(("get", "NODE")) == 1
    assert ("delete", "POD") not in requests
    site.look()
    events = [d for (k, _), d in site.cluster.objects.items() if k is Kind.EVENT]
    messages = [each["message"] for each in events if each["reason"] == "PodNotReleased"]
    assert len(messages) == 1
    assert "node n1 is ready" in messages[0]
    site.cluster.objects[Kind.NODE, "n1"] = dict(UNKNOWN)
    site.look()
    assert ("delete", "POD") in site.cluster.requests


@pytest.mark.parametrize("component", ["", KEEPER])
def test_the_job_reports_an_eviction_once(component: str) -> None:
    site = leaving_site(component)
    evicted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
               "message": "Eviction API: evicting"}  # fmt: skip
    (leaving,) = (p for p in site.store.all(Kind.POD) if "deletionTimestamp" in p["metadata"])
    status = leaving["status"] | {"conditions": [evicted]}
    metadata = leaving["metadata"] | {"resourceVersion": "5001"}
    site.store.put(Kind.POD, leaving | {"metadata": metadata, "status": status})
    site.look()
    site.look()
    events = [d for (k, _), d in site.cluster.objects.items() if k is Kind.EVENT]
    (message,) = [each["message"] for each in events if each["reason"] == "PodEvicted"]
    name = metadata["name"]
    assert message == f"pod {name} was evicted: EvictionByEvictionAPI: Eviction API: evicting"


@pytest.mark.parametrize("component", ["", KEEPER])
def test_a_pod_of_a_deleted_node_is_released(component: str) -> None:
    assert ("delete", "POD") in looked_at_late(leaving_site(component))


@pytest.mark.parametrize(
    ("error", "late_s", "goes"),
    [
        (RequestRefusedError("403 nodes", 403), SHORT_S, False),
        (RequestRefusedError("403 nodes", 403), LONG_S, True),
        (ServerError("503"), LONG_S, False),
    ],
)
def test_an_unreadable_node_counts_neither_as_ready_nor_as_lost(
    error: Exception, late_s: float, *, goes: bool
) -> None:
    site = leaving_site()

    def refuse(_verb: str, document: Document) -> None:
        if document.get("kind") == "NODE":
            raise error

    site.cluster.refuse = refuse
    looked_at_late(site)
    site.time_s = late_s
    site.look()
    assert (("delete", "POD") in site.cluster.requests) == goes


def test_an_operator_of_some_namespaces_reads_no_node() -> None:
    site = leaving_site(namespaces=("default",))
    assert ("get", "NODE") not in looked_at_late(site)
    assert ("delete", "POD") not in site.cluster.requests


def test_pods_of_a_deleted_job_follow_the_same_rules() -> None:
    site = leaving_site()
    site.cluster.objects[Kind.NODE, "n1"] = dict(READY)
    site.store.remove(Kind.DLION_JOB, site.cluster.objects.pop((Kind.DLION_JOB, "digits")))
    assert ("delete", "POD") not in looked_at_late(site)
    del site.cluster.objects[Kind.NODE, "n1"]
    site.look()
    assert ("delete", "POD") in site.cluster.requests
