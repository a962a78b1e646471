"""The control plane of one site: etcd, API server, controllers, scheduler, on the site's router.

As in k3s or kubeadm, with certificates for all but etcd, which listens on the machine's own
loopback. etcd does not sync to the disk, because its data need not survive the machine.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlion_api.errors import UnavailableError
from testbed.certificates import Authority, write_key_pair
from testbed.kubectl import Kubectl
from testbed.layout import API_PORT
from testbed.reader import reader_of

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.binaries import Binaries
    from testbed.layout import SiteLayout
    from testbed.machines import Machine

_READY_TIMEOUT_S = 120.0
_POLL_S = 0.25
_ETCD = "http://127.0.0.1:2379"
_ETCD_PEER = "http://127.0.0.1:2380"


@dataclass(frozen=True)
class ControlPlane:
    """The control plane of `site` on `machine`; `folder` holds its keys and kubeconfigs."""

    site: SiteLayout
    machine: Machine
    binaries: Binaries
    folder: Path

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig, for the tests."""
        return self.folder / "admin.kubeconfig"

    @property
    def kubectl(self) -> Kubectl:
        """kubectl with the administrator's rights."""
        return Kubectl(self.binaries.path("kubectl"), self.kubeconfig)

    @property
    def audit_log(self) -> Path:
        """Every request that the API server answered, one JSON document a line, without bodies."""
        return self.folder / "audit.log"

    def make_files(self) -> None:
        """Write certificates and kubeconfigs, once per testbed."""
        site = self.site
        authority = Authority.make(self.folder, "ca")
        server = ("kubernetes", "kubernetes.default", "kubernetes.default.svc",
                  "kubernetes.default.svc.cluster.local", "localhost", "127.0.0.1",
                  site.kubernetes_service, site.address)  # fmt: skip
        authority.issue("apiserver", "kube-apiserver", hosts=server)
        for name, user, groups in (
            ("admin", "testbed-admin", ("system:masters",)),
            ("apiserver-kubelet", "kube-apiserver-kubelet-client", ("system:masters",)),
            ("controller-manager", "system:kube-controller-manager", ()),
            ("scheduler", "system:kube-scheduler", ()),
            ("proxy", "system:kube-proxy", ()),
            ("kwok", "kwok", ("system:masters",)),
            *((n.name, f"system:node:{n.name}", ("system:nodes",)) for n in site.nodes),
        ):
            authority.issue(name, user, groups)
            config = authority.kubeconfig(site.api_server, name, site.name)
            path = self.folder / f"{name}.kubeconfig"
            path.touch(mode=0o600)
            path.write_text(config)
        for node in site.nodes:
            authority.issue(f"{node.name}-server", node.name, hosts=(node.name, node.address))
        front_proxy = Authority.make(self.folder, "front-proxy-ca")
        front_proxy.issue("front-proxy", "front-proxy-client")
        write_key_pair(self.folder, "service-account")
        (self.folder / "audit-policy.yaml").write_text(json.dumps({
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived"],
            "rules": [{"level": "Metadata"}],
        }))  # fmt: skip

    def start(self) -> None:
        """Start all programs that do not run, in order, and wait until the API server is ready.

        Raises: UnavailableError if it is not ready in time.
        """
        if self.machine.first_process() is None:
            self.machine.boot()
        running = {name for name, pid in self.machine.programs().items() if pid is not None}
        for name, flags in (
            ("etcd", self._etcd()),
            ("kube-apiserver", self._apiserver()),
            ("kube-controller-manager", self._controller_manager()),
            ("kube-scheduler", self._scheduler()),
        ):
            if name == "kube-controller-manager":
                self.wait_ready()  # before that it has no rights, and ends
            if name not in running:
                self.machine.start(name, [str(self.binaries.path(name)), *flags])

    def start_kwok(self, stages: Path | None = None) -> None:
        """Start KWOK, which simulates nodes, if it does not run.

        `stages` is a file with the stages of pods. KWOK's own stages end a Job's pods at once.
        """
        if self.machine.process("kwok") is None:
            self.machine.start("kwok", [
                str(self.binaries.path("kwok")),
                f"--kubeconfig={self.folder}/kwok.kubeconfig",
                "--manage-all-nodes=false",
                "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
                f"--node-ip={self.site.address}",
                *([f"--config={stages}"] if stages else []),
            ])  # fmt: skip

    def wait_ready(self) -> None:
        """Wait for /readyz. Raises: UnavailableError with the end of the API server's log."""
        deadline_s = time.monotonic() + _READY_TIMEOUT_S
        reader = reader_of(self.kubeconfig, "")
        assert reader is not None  # its user has a certificate
        while not reader.is_well("/readyz"):
            if time.monotonic() > deadline_s:
                log = self.machine.log_path("kube-apiserver")
                end = log.read_text(errors="replace")[-1500:] if log.exists() else "no log"
                raise UnavailableError(f"{self.site.name}: the API server is not ready\n{end}")
            time.sleep(_POLL_S)

    def _etcd(self) -> list[str]:
        return [
            f"--data-dir={self.folder}/etcd",
            f"--listen-client-urls={_ETCD}",
            f"--advertise-client-urls={_ETCD}",
            f"--listen-peer-urls={_ETCD_PEER}",
            f"--initial-advertise-peer-urls={_ETCD_PEER}",
            f"--initial-cluster=default={_ETCD_PEER}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    def _apiserver(self) -> list[str]:
        site, files = self.site, self.folder
        return [
            f"--advertise-address={site.address}",
            f"--secure-port={API_PORT}",
            f"--etcd-servers={_ETCD}",
            f"--service-cluster-ip-range={site.service_network}",
            "--allow-privileged=true",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--client-ca-file={files}/ca.crt",
            f"--tls-cert-file={files}/apiserver.crt",
            f"--tls-private-key-file={files}/apiserver.key",
            f"--kubelet-certificate-authority={files}/ca.crt",
            f"--kubelet-client-certificate={files}/apiserver-kubelet.crt",
            f"--kubelet-client-key={files}/apiserver-kubelet.key",
            "--kubelet-preferred-address-types=InternalIP",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={files}/service-account.pub",
            f"--service-account-signing-key-file={files}/service-account.key",
            f"--requestheader-client-ca-file={files}/front-proxy-ca.crt",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-username-headers=X-Remote-User",
            f"--proxy-client-cert-file={files}/front-proxy.crt",
            f"--proxy-client-key-file={files}/front-proxy.key",
            f"--audit-policy-file={files}/audit-policy.yaml",
            f"--audit-log-path={self.audit_log}",
            "--profiling=false",
        ]

    def _controller_manager(self) -> list[str]:
        files = self.folder
        return [
            *self._as("controller-manager"),
            f"--root-ca-file={files}/ca.crt",
            f"--service-account-private-key-file={files}/service-account.key",
            f"--cluster-signing-cert-file={files}/ca.crt",
            f"--cluster-signing-key-file={files}/ca.key",
            "--use-service-account-credentials=true",
            # A lost node is noticed after 20 s rather than 50: the kubelet reports every 4 s. With
            # KWOK's nodes alone none is lost, and KWOK reports late on a busy machine.
            f"--node-monitor-grace-period={20 if self.site.nodes else 300}s",
            "--node-monitor-period=2s",
        ]

    def _scheduler(self) -> list[str]:
        return self._as("scheduler")

    def _as(self, user: str) -> list[str]:
        config = f"{self.folder}/{user}.kubeconfig"
        return [
            f"--kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
            "--profiling=false",
            # The default is 20 and 50 requests per second, for a cluster with many users.
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
        ]
