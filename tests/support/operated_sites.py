"""Two sites beside real API servers, with a federated operator each as a process.

The workers and keepers of a job are processes with the ConfigMaps and tokens of its pods, which no
node runs.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlion_api import cluster_names as names
from dlion_api.names import KeeperIdentity, WorkerIdentity
from dlion_api.protocol.pod_config import PodConfig
from fault_proxy import FaultProxy, waited
from operator_process import OperatorProcess, free_ports
from pod_run import PodRun

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl

WITHIN_S = 60.0


@dataclass
class OperatedSite:
    """One site: its API server, the proxy that counts its requests, its operator."""

    name: str
    kubectl: Kubectl
    proxy: FaultProxy
    operator: OperatorProcess

    def status(self, job: str) -> dict[str, Any]:
        """The status of that job at this site."""
        return dict(self.kubectl.get("dlj", job).get("status") or {})

    def conditions(self, job: str) -> list[tuple[str, str, str]]:
        """Type, status and reason of each condition."""
        found = self.status(job).get("conditions") or ()
        return sorted((c["type"], c["status"], c["reason"]) for c in found)

    def bundle_pem(self) -> bytes:
        """The bundle with which other sites trust this one."""
        secret = replace(self.kubectl, namespace="default").get("secret", "dlion-authority")
        return base64.b64decode(secret["data"]["tls.crt"])


@contextmanager
def operated_sites(folder: Path, kubectls: dict[str, Kubectl]) -> Iterator[list[OperatedSite]]:
    """Start those sites with operators that trust each other."""
    ports = dict(zip(kubectls, free_ports(len(kubectls)), strict=True))
    made: list[OperatedSite] = []
    with ExitStack() as stack:
        for name, kubectl in kubectls.items():
            (own := folder / name).mkdir()
            others = [
                {
                    "name": other,
                    "address": f"127.0.0.1:{ports[other]}",
                    "bundleFile": str(folder / f"{other}.pem"),
                }
                for other in kubectls
                if other != name
            ]
            settings = {"federation": {"port": ports[name]}, "sites": others}
            proxy = stack.enter_context(FaultProxy(kubectl.kubeconfig, own))
            operator = OperatorProcess(own, proxy.kubeconfig, site=name, settings=settings)
            stack.enter_context(operator)
            made.append(OperatedSite(name, kubectl, proxy, operator))
            (folder / f"{name}.pem").write_bytes(made[-1].bundle_pem())
        yield made


class OperatedPods(PodRun):
    """One site's pods of a job that its operator has created."""

    def __init__(
        self, folder: Path, document: dict[str, Any], site: OperatedSite, *, subnet: int
    ) -> None:
        self._there = site
        super().__init__(folder, document, subnet=subnet, site=site.name)

    def start_coordinator(self) -> None:
        """Start nothing: the operator hosts the coordinator."""

    def prepare(self, name: str, identity: WorkerIdentity | KeeperIdentity) -> Path:
        """Write what the operator's objects and a kubelet would mount."""
        root = self.root(name)
        for path in (names.CONFIG_DIR, names.TOKEN_DIR, names.SHARED_DIR, names.STATE_DIR):
            (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        mounted = root / names.CONFIG_DIR.lstrip("/")
        for key, text in self._config_map().items():
            (mounted / key).write_text(text)
        config = PodConfig.load(mounted / names.POD_CONFIG_KEY)
        reached = f"{self.address(101)}:{names.KEEPER_PORT}"  # the Service's name is known in pods
        config = replace(config, keeper_address=reached)
        (mounted / names.POD_CONFIG_KEY).write_text(config.to_json())
        token = root / names.TOKEN_DIR.lstrip("/") / names.TOKEN_FILE
        token.write_text(self._token(identity))
        return root

    def close(self) -> None:
        """End all its processes."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def _config_map(self) -> dict[str, str]:
        (found,) = self._objects("configmaps")
        return dict(found["data"])

    def _token(self, identity: WorkerIdentity | KeeperIdentity) -> str:
        wanted = {names.COMPONENT_LABEL: "keeper"}
        if isinstance(identity, WorkerIdentity):
            wanted = {
                names.COMPONENT_LABEL: "worker",
                names.GROUP_LABEL: identity.group,
                names.INDEX_LABEL: str(identity.index),
            }
        found: list[str] = []

        def is_made() -> bool:
            pods = [
                pod["metadata"]["name"]
                for pod in self._objects("pods")
                if wanted.items() <= pod["metadata"]["labels"].items()
            ]
            found[:] = pods
            return bool(pods)

        assert waited(is_made, WITHIN_S), f"no pod of {identity.name}"
        return self._there.kubectl.run(
            "create", "token", "default", f"--audience={names.TOKEN_AUDIENCE}",
            "--bound-object-kind=Pod", f"--bound-object-name={found[0]}",
        ).strip()  # fmt: skip

    def _objects(self, kind: str) -> Sequence[dict[str, Any]]:
        chosen = f"{names.JOB_LABEL}={self.job.key.name}"
        found: Sequence[dict[str, Any]] = self._there.kubectl.get(kind, "-l", chosen)["items"]
        return found


def max_in_a_minute(moments_s: Sequence[float], window_s: float = 60.0) -> int:
    """The maximum number of those ascending moments within one minute."""
    most = begin = 0
    for end, moment_s in enumerate(moments_s):
        while moment_s - moments_s[begin] >= window_s:
            begin += 1
        most = max(most, end - begin + 1)
    return most
