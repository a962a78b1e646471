"""Test two operators with the same jobs and a real API server.

Only one writes, and its status is kept. After it is killed, the other takes over within 20 s and
the run continues with the same children. After an orderly end the other follows within seconds. The
metric and the log name the active one.

Left out: pods that run; outages and clocks (tests/unit/operator/kubernetes/test_lease.py).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from fault_proxy import FaultProxy, waited
from operator_process import OperatorProcess
from podless_jobs import children, manifest, settled, state_of, workers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed.kubectl import Kubectl

pytestmark = pytest.mark.cluster
HELD = "dlion_lease_held"
STANDS_S = 12.0


@pytest.fixture
def proxies(kubectl: Kubectl, tmp_path: Path) -> Iterator[list[FaultProxy]]:
    """Proxies that count the requests of each of two operators."""
    folders = [tmp_path / "one", tmp_path / "other"]
    for each in folders:
        each.mkdir()
    with (
        FaultProxy(kubectl.kubeconfig, folders[0]) as one,
        FaultProxy(kubectl.kubeconfig, folders[1]) as other,
    ):
        yield [one, other]


def operator_behind(proxy: FaultProxy, kubectl: Kubectl) -> OperatorProcess:
    home = kubectl.namespace
    folder = proxy.kubeconfig.parent
    return OperatorProcess(folder, proxy.kubeconfig, namespaces=(home,), namespace=home)


@pytest.mark.timeout(240)
def test_the_second_operator_takes_over_when_the_first_is_killed(
    kubectl: Kubectl, proxies: list[FaultProxy]
) -> None:
    first, second = proxies
    with operator_behind(first, kubectl) as one, operator_behind(second, kubectl) as other:
        kubectl.apply(manifest(), manifest("resting", suspend=True))
        there = settled(kubectl, pods=3)
        assert waited(lambda: one.metric(HELD) + other.metric(HELD) == 1, 10)
        if other.metric(HELD):
            (one, other), (first, second) = (other, one), (second, first)
        assert waited(lambda: state_of(kubectl, "resting") == "Suspended", 30)
        version = kubectl.get("dlj", "resting")["metadata"]["resourceVersion"]
        since = len(first.requests)
        time.sleep(STANDS_S)
        assert kubectl.get("dlj", "resting")["metadata"]["resourceVersion"] == version
        assert [str(each) for each in second.requests if each.writing and not _is_own(each)] == []
        renewals = [
            r for r in first.requests[since:] if r.method == "PATCH" and "/leases" in r.path
        ]
        assert 1 <= len(renewals) <= STANDS_S / 5 + 1
        assert "is held by another operator" in other.log.read_text()

        uids = {each["metadata"]["uid"] for each in kubectl.get("jobs")["items"]}
        one.kill()
        began_s = time.monotonic()
        assert waited(lambda: other.metric(HELD) == 1, 20), other.last_log_lines()
        print(f"taken over {time.monotonic() - began_s:.1f} s after the kill")
        kubectl.apply(manifest(small=3))
        assert waited(lambda: len(workers(kubectl)) == 4, 20), other.last_log_lines()
        assert {each["metadata"]["uid"] for each in kubectl.get("jobs")["items"]} == uids
        assert {each for each in children(kubectl) if "Pod/" not in each} == {
            each for each in there if "Pod/" not in each
        }

        one.start()
        assert one.metric(HELD) == 0
        other.end()
        assert waited(lambda: one.metric(HELD) == 1, 10), one.last_log_lines()
        for each in (one, other):
            assert 'result="defect"' not in each.last_log_lines()
        assert one.metric('dlion_operator_reconciles_total{result="defect"}') == 0


def _is_own(request: object) -> bool:
    """Report whether it is of the operators' authority, which share one namespace here."""
    return "dlion-authority" in str(request) or str(request).endswith("/secrets")
