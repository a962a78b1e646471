"""Test queued jobs that wait, with a real API server and Kueue's own definitions.

While fifty jobs wait, the operator makes no request for any of them and changes nothing, for longer
than a round of its lists. The admission of one starts its Jobs without the next pass. For a minute
Workloads cannot be listed or watched, as when Kueue's webhook is down. The operator continues,
restarts and serves other jobs, and then queued ones.

Left out: Kueue itself, in whose place the test admits (test_queueing), and pods.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import kueue
from fault_proxy import Answer, FaultProxy
from operator_process import OperatorProcess
from podless_jobs import manifest
from trained_jobs import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fault_proxy import Request
    from testbed.kubectl import Kubectl

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("no_running_pods"),
]
JOBS = 50
REST_S = 65.0
"""Longer than the time between two rounds of lists."""
ADMITTED = tuple(f"job-{number:02}" for number in range(0, JOBS, 7))
OUTAGE_S = 65.0
"""Longer than kopf tries by default."""
MAX_S = 3.0
"""Bound on a busy machine. Without an event it is five: a waiting job has a pass every ten."""


def queued(name: str) -> dict[str, Any]:
    document = manifest(name)
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "edge"}
    return document


def waiting(kubectl: Kubectl) -> int:
    """Return the number of jobs whose status is waiting in their queue."""
    statuses = (each.get("status") or {} for each in kubectl.get("dlj")["items"])
    conditions = (each for status in statuses for each in status.get("conditions") or ())
    return sum((each["type"], each["reason"]) == ("Ready", "Queued") for each in conditions)


def jobs_of(kubectl: Kubectl, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = kubectl.get("jobs", "-l", f"dlion.dev/job-name={name}")["items"]
    return found


def starts(proxy: FaultProxy, name: str, since: int) -> list[Request]:
    """Return the patches of that job's Jobs."""
    return [
        each
        for each in proxy.requests[since:]
        if each.method == "PATCH" and f"/jobs/{name}-" in each.path
    ]


def delay_s(kubectl: Kubectl, proxy: FaultProxy, name: str) -> float:
    """Return the time from the admission of a job to the request that starts one of its Jobs."""
    since = len(proxy.requests)
    kueue.admit(replace(kubectl, kubeconfig=proxy.kubeconfig), name, "arm")
    found = eventually(lambda: starts(proxy, name, since), what=f"{name} started")
    admitted = next(
        each
        for each in proxy.requests[since:]
        if each.method == "PATCH" and f"/workloads/{name}-" in each.path
    )
    return float(found[0].at_s - admitted.at_s)


@pytest.fixture
def proxy(kubectl: Kubectl, tmp_path: Path) -> Iterator[FaultProxy]:
    """A proxy before an API server with Kueue's kinds and a flavor."""
    if not kubectl.knows("workloads.kueue.x-k8s.io"):
        kueue.install(kubectl)
    kubectl.apply(kueue.resource_flavor("arm", {"arch": "arm"}))
    with FaultProxy(kubectl.kubeconfig, tmp_path) as served:
        yield served


@pytest.fixture
def operator(proxy: FaultProxy, kubectl: Kubectl, tmp_path: Path) -> Iterator[OperatorProcess]:
    home = kubectl.namespace
    with OperatorProcess(
        tmp_path,
        proxy.kubeconfig,
        namespaces=(home,),
        namespace=home,
        settings={"kueue": True, "networkPolicies": {"enabled": True}},
    ) as process:
        yield process
        assert process.metric('dlion_operator_reconciles_total{result="defect"}') == 0


def test_fifty_queued_jobs_cause_no_request_and_start_when_admitted(
    kubectl: Kubectl, proxy: FaultProxy, operator: OperatorProcess
) -> None:
    alone_mb = operator.memory_mb()
    kubectl.apply(*(queued(f"job-{number:02}") for number in range(JOBS)))
    eventually(lambda: waiting(kubectl) == JOBS, within_s=180, what="all queued")
    eventually(lambda: proxy.is_quiet(5.0), what="the operator at rest")
    before = len(proxy.requests)
    time.sleep(REST_S)
    asked = proxy.requests[before:]
    of_jobs = [str(each) for each in asked if "/job-" in each.path]
    print(
        f"{JOBS} queued jobs, {REST_S:g} s: {len(asked)} requests, {len(of_jobs)} about a job;"
        f" {operator.memory_mb():.0f} MB, {alone_mb:.0f} MB without jobs"
    )
    assert of_jobs == []
    assert [str(each) for each in asked if each.writing] == []

    delays_s = sorted(delay_s(kubectl, proxy, name) for name in ADMITTED)
    print("admission to start, s: " + ", ".join(f"{each:.2f}" for each in delays_s))
    assert statistics.median(delays_s) < MAX_S


def test_an_outage_of_kueues_webhook_ends_no_run(
    kubectl: Kubectl, proxy: FaultProxy, operator: OperatorProcess
) -> None:
    kubectl.apply(queued("job-00"))
    eventually(lambda: waiting(kubectl) == 1, what="Queued")
    proxy.answer = Answer(500, lambda request: request.path.endswith("/workloads"))
    proxy.drop_watches()
    kubectl.apply(manifest("plain"))
    eventually(lambda: jobs_of(kubectl, "plain"), what="Jobs of another job")
    time.sleep(OUTAGE_S)
    assert operator.is_running(), operator.last_log_lines()
    operator.kill()
    operator.start()
    kubectl.apply(manifest("later"))
    eventually(lambda: jobs_of(kubectl, "later"), what="Jobs after a restart")
    proxy.answer = None
    kueue.admit(kubectl, "job-00", "arm")
    eventually(lambda: starts(proxy, "job-00", 0), within_s=30, what="the admitted job started")
