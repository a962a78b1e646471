"""The operator beside an API server whose etcd is put back to an earlier copy, as from a snapshot.

Proves: resource versions that go back are noticed, told and counted; what was made since is no
longer taken for there; the job is brought to where the restored manifest wants it, before and after
the restart that liveness asks for, since watches at a version to come bring nothing.
Left out: pods that run; a snapshot with workers of another run at work.
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
"""The operator renews its Lease every five seconds, and lists again then."""


def lease_version(kubectl: Kubectl) -> str:
    return str(kubectl.get("lease", LEASE_NAME)["metadata"]["resourceVersion"])


@pytest.mark.timeout(600)
def test_an_etcd_that_is_restored_is_taken_for_the_truth(
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
        print(f"noticed {time.monotonic() - began_s:.0f} s after the restore")
        assert waited(lambda: operator.livez()[0] == 503, 5)
        assert "went back" in operator.livez()[1]
        kubectl.apply(manifest())
        assert waited(lambda: len(workers(kubectl)) == 3, 90), operator.last_log_lines()
        assert not [each for each in children(kubectl) if "later" in each]
        operator.end()
        operator.start()  # as a kubelet does then
        kubectl.apply(manifest(suspend=True))
        assert waited(lambda: state_of(kubectl) == "Suspended", 20)
        assert operator.livez()[0] == 200
        assert operator.metric('dlion_operator_reconciles_total{result="defect"}') == 0
