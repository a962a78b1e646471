"""Test an operator whose node's clock is two hours ahead, with a real API server.

A run's deadline is compared with the API server's time, and its events have that time. Left out:
the certificates of such an operator, which have the times of its own clock.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from fault_proxy import waited
from operator_process import OperatorProcess
from podless_jobs import manifest, settled, state_of

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.kubectl import Kubectl

pytestmark = pytest.mark.cluster
AHEAD_S = 7200.0


def test_a_clock_ahead_ends_no_run(kubectl: Kubectl, tmp_path: Path) -> None:
    home = kubectl.namespace
    with OperatorProcess(
        tmp_path, kubectl.kubeconfig, namespaces=(home,), namespace=home, clock_ahead_s=AHEAD_S
    ) as operator:
        kubectl.apply(manifest(activeDeadlineSeconds=600))
        settled(kubectl, pods=3)
        looks = operator.metric("dlion_operator_reconciles_total")
        assert waited(lambda: operator.metric("dlion_operator_reconciles_total") >= looks + 2, 40)
        assert state_of(kubectl) not in ("Succeeded", "Failed", "")
        (event, *_) = kubectl.get("events", "--field-selector=reason=WorkersCreated")["items"]
        event_s = datetime.fromisoformat(event["lastTimestamp"]).timestamp()
        assert abs(event_s - time.time()) < 120, (event, datetime.now(UTC))
