"""The workers and the keeper of a run as processes, in place of its pods, which no node runs.

The job and its operator use a real API server. Each process has its own pod's token and the
contents of the run's ConfigMap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlion_api import cluster_names as names
from dlion_api.names import KeeperIdentity, Rank, WorkerIdentity
from dlion_api.protocol.pod_config import PodConfig
from dlion_api.protocol.worker_config import COORDINATOR_DNS_NAME
from pod_run import PodRun
from trained_jobs import eventually

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl


class ClusterPods(PodRun):
    """The pods of one run; the operator hosts the coordinator."""

    def __init__(
        self, folder: Path, document: dict[str, Any], kubectl: Kubectl, *, subnet: int
    ) -> None:
        self._kubectl = kubectl
        super().__init__(folder, document, subnet=subnet)

    def start_coordinator(self) -> None:
        """Start nothing: the operator hosts the coordinator."""

    def prepare(self, name: str, identity: WorkerIdentity | KeeperIdentity) -> Path:
        """Write the files that a kubelet would mount into that pod; existing files stay."""
        root = self.root(name)
        for path in (names.CONFIG_DIR, names.TOKEN_DIR, names.SHARED_DIR, names.STATE_DIR):
            (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        mounted = root / names.CONFIG_DIR.lstrip("/")
        config_map = self._kubectl.get("configmap", names.run_name(self.job.key))
        for key, text in config_map["data"].items():
            (mounted / key).write_text(text)
        if program := self.job.spec.trainer.program.config_map:
            (folder := root / names.PROGRAM_DIR.lstrip("/")).mkdir(parents=True, exist_ok=True)
            for key, text in self._kubectl.get("configmap", program.name)["data"].items():
                (folder / key).write_text(text)
        # The address that the cluster's DNS would return.
        keeper = f"{self.address(101)}:{names.KEEPER_PORT}"
        config = replace(PodConfig.load(mounted / names.POD_CONFIG_KEY), keeper_address=keeper)
        (mounted / names.POD_CONFIG_KEY).write_text(config.to_json())
        token = self.token_of(identity)
        (root / names.TOKEN_DIR.lstrip("/") / names.TOKEN_FILE).write_text(token)
        return root

    def lose_worker(self, rank: int) -> None:
        """Delete the worker's pod and wait for another one.

        In the same pod, a process that has lost its key would be refused once the earlier one has
        connected.
        """
        identity = self.job.worker(Rank(rank))
        lost = self.pod_of(identity)
        self._kubectl.run("delete", "pod", lost["name"], "--grace-period=0", "--force")
        eventually(lambda: self._others(identity, lost["uid"]), what="another pod of that worker")
        super().lose_worker(rank)

    def _others(self, identity: WorkerIdentity, uid: str) -> bool:
        found = self._pods_of(identity)
        return len(found) == 1 and found[0]["uid"] != uid

    def all_train(self) -> bool:
        """Whether the job's status reports all workers as training. No node runs the keeper's pod,
        so the job is Degraded after a minute."""
        status = self._kubectl.get("dlj", self.job.key.name).get("status") or {}
        all_there = "{0}/{0}".format(len(self.job.workers()))
        is_training = status.get("state") in ("Training", "Degraded")
        return is_training and status.get("readyWorkers") == all_there

    def close(self) -> None:
        """Remove everything."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def token_of(self, identity: WorkerIdentity | KeeperIdentity) -> str:
        """Return a new token of that worker's pod."""
        pod = self.pod_of(identity)
        return self._kubectl.run(
            "create", "token", "default", f"--audience={names.TOKEN_AUDIENCE}",
            "--bound-object-kind=Pod", f"--bound-object-name={pod['name']}",
            f"--bound-object-uid={pod['uid']}",
        ).strip()  # fmt: skip

    def pod_of(self, identity: WorkerIdentity | KeeperIdentity) -> dict[str, Any]:
        """Return the metadata of that worker's pod, once it exists."""
        (pod,) = eventually(lambda: self._pods_of(identity), what="its pod")
        return pod

    def _pods_of(self, identity: WorkerIdentity | KeeperIdentity) -> list[dict[str, Any]]:
        if isinstance(identity, WorkerIdentity):
            role = names.WORKER
            place = {names.GROUP_LABEL: identity.group, names.INDEX_LABEL: str(identity.index)}
        else:
            role, place = names.KEEPER, {}
        wanted = place | {names.COMPONENT_LABEL: role, names.JOB_LABEL: self.job.key.name}
        chosen = ",".join(f"{key}={value}" for key, value in wanted.items())
        return [each["metadata"] for each in self._kubectl.get("pods", "-l", chosen)["items"]]


@dataclass(frozen=True)
class Access:
    """The address of the operator's coordinator, for one pod of a run (`ClusterPods.prepare`)."""

    coordinator_address: str
    root: Path
    coordinator_dns_name: str = COORDINATOR_DNS_NAME

    @property
    def authority_pem_path(self) -> str:
        return str(self.root / f"etc/dlion/{names.AUTHORITY_KEY}")

    @property
    def token_path(self) -> str:
        return str(self.root / f"var/run/secrets/dlion/{names.TOKEN_FILE}")

    @property
    def proof_dir(self) -> Path:
        """The pod's proof, whether or not a process has run there."""
        folder = self.root / names.SHARED_DIR.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        return folder
