"""One node of a site: containerd, CNI, kubelet and kube-proxy, as on a small edge machine.

All files are where a real node has them; each node's machine has separate folders there. Comments
beside the settings name the requirements of the kernel or of the missing CAP_SYS_RESOURCE.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlion_api.errors import UnavailableError
from testbed.images import PAUSE_IMAGE
from testbed.networks import congestion_control

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from testbed.binaries import Binaries
    from testbed.layout import NodeLayout
    from testbed.machines import Machine
    from testbed.project_images import ProjectImage

SOCKET = "/run/containerd/containerd.sock"
CNI_PLUGINS = "/usr/lib/cni"
_START_TIMEOUT_S = 30.0
_IMPORT_TIMEOUT_S = 600.0
_POLL_S = 0.1

CONTAINERD = """\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
# It would make a folder in /opt, and import of other places' programs is not wanted.
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.aufs"]

[grpc]
  address = "{socket}"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  # Without CAP_SYS_RESOURCE no score may fall, and runc fails with "can't get final child's PID".
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{cni}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
"""


@dataclass(frozen=True)
class Node:
    """The node `layout` on `machine`; `folder` holds its configuration, `keys` the site's files."""

    layout: NodeLayout
    machine: Machine
    binaries: Binaries
    folder: Path
    keys: Path

    def make_files(self) -> None:
        """Write all files that it reads, once per testbed."""
        cni = self.folder / "cni"
        cni.mkdir(parents=True, exist_ok=True)
        (cni / "10-testbed.conflist").write_text(json.dumps(self._cni(), indent=1))
        (self.folder / "containerd.toml").write_text(
            CONTAINERD.format(socket=SOCKET, pause=PAUSE_IMAGE, plugins=CNI_PLUGINS, cni=cni)
        )
        (self.folder / "kubelet.json").write_text(json.dumps(self._kubelet(), indent=1))
        # CoreDNS has no upstream: pods cannot resolve names outside the testbed.
        (self.folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")

    def start(self) -> None:
        """Start all programs that do not run. Raises: UnavailableError."""
        if self.machine.first_process() is None:
            self.machine.boot()
        running = {name for name, pid in self.machine.programs().items() if pid is not None}
        for name, command in (
            ("containerd", ["containerd", f"--config={self.folder}/containerd.toml"]),
            ("kubelet", self._kubelet_command()),
            ("kube-proxy", self._proxy_command()),
        ):
            if name not in running:
                self.machine.start(name, command)
            if name == "containerd":
                self._wait_for_containerd()

    def load_image(self, archive: Path) -> None:
        """Import a docker or OCI archive. Raises: UnavailableError with ctr's output."""
        self.machine.run(
            "ctr", "--address", SOCKET, "--namespace", "k8s.io", "images", "import", "-",
            stdin=archive, timeout_s=_IMPORT_TIMEOUT_S,
        )  # fmt: skip

    def load_missing(self, images: Iterable[ProjectImage]) -> None:
        """Import those images that the node lacks. Raises: UnavailableError."""
        known = set(self.images())
        for image in images:
            if image.reference not in known:
                self.load_image(image.archive)

    def name_image(self, reference: str, name: str) -> None:
        """Give an image of the node an additional name; may be repeated. Raises:
        UnavailableError."""
        self.machine.run(
            "ctr", "--address", SOCKET, "--namespace", "k8s.io", "images", "tag", "--force",
            reference, name,
        )  # fmt: skip

    def images(self) -> list[str]:
        """References of the node's images."""
        text = self.machine.run(
            "ctr", "--address", SOCKET, "--namespace", "k8s.io", "images", "ls", "-q"
        )
        return sorted(line for line in text.split() if not line.startswith("sha256:"))

    def require_kubelet(self) -> None:
        """Raises: UnavailableError with the end of its log if the kubelet has ended."""
        if self.machine.process("kubelet") is None:
            log = self.machine.log_path("kubelet").read_text(errors="replace")
            raise UnavailableError(f"{self.layout.name}: kubelet has ended: {log[-1500:]}")

    def _wait_for_containerd(self) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                self.machine.run("ctr", "--address", SOCKET, "version", timeout_s=10)
            except UnavailableError as error:
                if time.monotonic() > deadline_s:
                    log = self.machine.log_path("containerd").read_text(errors="replace")
                    raise UnavailableError(f"{error}\n{log[-1500:]}") from None
                time.sleep(_POLL_S)
            else:
                return

    def _kubelet_command(self) -> Sequence[str]:
        return [
            str(self.binaries.path("kubelet")),
            f"--config={self.folder}/kubelet.json",
            f"--kubeconfig={self.keys}/{self.layout.name}.kubeconfig",
            f"--hostname-override={self.layout.name}",
            f"--node-ip={self.layout.address}",
            f"--node-labels=topology.kubernetes.io/zone={self.layout.site.name}",
        ]

    def _proxy_command(self) -> Sequence[str]:
        return [
            str(self.binaries.path("kube-proxy")),
            f"--kubeconfig={self.keys}/proxy.kubeconfig",
            f"--hostname-override={self.layout.name}",
            f"--cluster-cidr={self.layout.site.pod_network}",
            "--proxy-mode=iptables",
            "--conntrack-max-per-core=0",  # cannot be set in a namespace
            "--conntrack-tcp-timeout-established=0s",
            "--conntrack-tcp-timeout-close-wait=0s",
            "--oom-score-adj=0",
        ]

    def _kubelet(self) -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": f"{self.keys}/ca.crt"},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": f"{self.keys}/{self.layout.name}-server.crt",
            "tlsPrivateKeyFile": f"{self.keys}/{self.layout.name}-server.key",
            "containerRuntimeEndpoint": f"unix://{SOCKET}",
            "clusterDNS": [self.layout.site.dns_service],
            "clusterDomain": "cluster.local",
            "resolvConf": f"{self.folder}/resolv.conf",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self.machine.groups.kubelet_root,
            "failCgroupV1": False,
            "failSwapOn": False,
            "oomScoreAdj": 0,
            # All nodes share one disk: an eviction would depend on other nodes.
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "nodefs.inodesFree": "1%",
                "imagefs.available": "1%",
            },
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "nodeStatusUpdateFrequency": "4s",
            "syncFrequency": "10s",
        }

    def _cni(self) -> dict[str, Any]:
        sysctl = {"net.ipv4.tcp_congestion_control": congestion_control()}
        return {
            "cniVersion": "1.0.0",
            "name": "testbed",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "cni0",
                    "isGateway": True,
                    "hairpinMode": True,
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{"subnet": self.layout.pod_network}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                },
                {"type": "portmap", "capabilities": {"portMappings": True}},
                {"type": "bandwidth", "capabilities": {"bandwidth": True}},
                {"type": "tuning", "sysctl": sysctl},
            ],
        }
