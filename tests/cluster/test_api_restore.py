"""Test the operator when its API server's etcd is restored to an earlier copy.

Resource versions that decrease are detected, reported and counted. Objects created since the copy
no longer count as present. The job reaches the state of the restored manifest before and after the
restart that liveness requests, since watches at a future version report nothing.

Left out: pods that run; a snapshot with workers of another run.
"""

from __future__ import annotations

import shutil
import signal
import time
from typing import TYPE_CHECKING

import pytest

from dlion_operator.kubernetes.lease import LEASE_NAME
from fault_proxy import waited
from operator_process import OperatorProcess
from podless_jobs import children, manifest, settled, state_of, workers

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.kubectl import Kubectl
    from testbed.sites import Site

pytestmark = [pytest.mark.cluster, pytest.mark.root, pytest.mark.slow]
PROGRAMS = ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd")
NOTICED_S = 30.0
"""The operator renews its Lease every five seconds, and then lists again."""


def lease_version(kubectl: Kubectl) -> str:
    return str(kubectl.get("lease", LEASE_NAME)["metadata"]["resourceVersion"])


@pytest.mark.timeout(600)
def test_the_operator_follows_a_restored_etcd(
    api_site: Site, kubectl: Kubectl, tmp_path: Path
) -> None:
    plane, home = api_site.control_plane, kubectl.namespace
    data, copy = plane.folder / "etcd", tmp_path / "etcd"
    with OperatorProcess(
        tmp_path, kubectl.kubeconfig, namespaces=(home,), namespace=home
    ) as operator:
        kubectl.apply(manifest(suspend=True))
        assert waited(lambda: state_of(kubectl) == "Suspended", 30)
        plane.machine.signal("etcd", signal.SIGSTOP)
        shutil.copytree(data, copy)
        plane.machine.signal("etcd", signal.SIGCONT)
        kubectl.apply(manifest(), manifest("later"))
        settled(kubectl, pods=6, jobs=4)
        copied = lease_version(kubectl)
        assert waited(lambda: lease_version(kubectl) != copied, 10), "it is renewed"
        for name in PROGRAMS:
            plane.machine.stop(name)
        shutil.rmtree(data)
        shutil.copytree(copy, data)
        plane.start()
        plane.wait_ready()
        began_s = time.monotonic()
        assert state_of(kubectl) == "Suspended"
        assert not children(kubectl)
        restored = "dlion_operator_restores_total"
        assert waited(lambda: operator.metric(restored) >= 1, NOTICED_S), operator.last_log_lines()
        print(f"detected {time.monotonic() - began_s:.0f} s after the restore")
        assert waited(lambda: operator.livez()[0] == 503, 5)
        assert "went back" in operator.livez()[1]
        kubectl.apply(manifest())
        assert waited(lambda: len(workers(kubectl)) == 3, 90), operator.last_log_lines()
        assert not [each for each in children(kubectl) if "later" in each]
        operator.end()
        operator.start()  # as a kubelet does
        kubectl.apply(manifest(suspend=True))
        assert waited(lambda: state_of(kubectl) == "Suspended", 20)
        assert operator.livez()[0] == 200
        assert operator.metric('dlion_operator_reconciles_total{result="defect"}') == 0
