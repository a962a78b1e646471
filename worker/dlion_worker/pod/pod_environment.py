"""Reads a pod's mounts and environment, and derives the worker's configuration.

Owns the paths below a root (the file system's, or a test's), the environment variables, and the
mapping from site, group and index to a rank. Called by `__main__`.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dlion_api import cluster_names as names
from dlion_api.errors import Problem, SpecError
from dlion_api.names import SiteName, WorkerIdentity
from dlion_api.protocol.pod_config import PodConfig
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.spec import Job, load_job

POD_ENVIRONMENT = "environment of the pod"


@dataclass(frozen=True)
class Pod:
    root: Path
    environment: Mapping[str, str]
    config: PodConfig
    job: Job

    @classmethod
    def read(cls, root: Path, environment: Mapping[str, str]) -> Pod:
        """Read the run's ConfigMap. Raises: SpecError, OSError."""
        path = under_root(root, names.CONFIG_DIR) / names.POD_CONFIG_KEY
        config = PodConfig.load(path)
        return cls(root, environment, config, load_job(config.job_document, source=str(path)))

    @property
    def site(self) -> SiteName:
        """The site of this pod. Raises: SpecError where it is not in the manifest."""
        sites = [site.name for site in self.job.spec.sites]
        if self.config.site not in sites:
            problem = Problem(
                "site", "is not a site of the job", self.config.site, allowed=", ".join(sites)
            )
            raise SpecError([problem], source=names.POD_CONFIG_KEY)
        return SiteName(self.config.site)

    @property
    def job_uid(self) -> str:
        """UID of the DLionJob at this site; empty where the operator has not given it."""
        return str(self.config.job_document["metadata"].get("uid", ""))

    def worker(self) -> WorkerIdentity:
        """The worker of this pod. Raises: SpecError where it is not in the manifest."""
        group, index = self._variable(names.GROUP_VARIABLE), self._index()
        try:
            return self.job.worker_at(self.site, group, index)
        except LookupError as error:
            problem = Problem(
                f"{names.GROUP_VARIABLE}, {names.INDEX_VARIABLE}",
                str(error),
                value=f"{group}, {index}",
                advice="Change spec.sites[].groups[].workers of the DLionJob, not the Job",
            )
            raise SpecError([problem], source=POD_ENVIRONMENT) from error

    def address(self) -> str:
        """This pod's IP address. Raises: SpecError."""
        given = self._variable(names.POD_IP_VARIABLE)
        try:
            return str(ipaddress.ip_address(given))
        except ValueError:
            raise _invalid_value(names.POD_IP_VARIABLE, given, "an IPv4 or IPv6 address") from None

    def wildcard_host(self) -> str:
        """The host for all addresses of this pod, in its IP family."""
        if not self.environment.get(names.POD_IP_VARIABLE):
            return "::"
        return "::" if ":" in self.address() else "0.0.0.0"  # noqa: S104 - a pod's own network

    def authority_path(self) -> str:
        """Path of the coordinator's CA; empty: plain text. Raises: SpecError where it is missing.

        An operator's coordinator uses TLS whatever the job's links use.
        """
        path = under_root(self.root, names.CONFIG_DIR) / names.AUTHORITY_KEY
        if not path.is_file():
            if self.job.spec.tls.mode == "Disabled":
                return ""
            problem = Problem(str(path), "is missing", advice="The operator puts it there")
            raise SpecError([problem], source=f"tls.mode {self.job.spec.tls.mode}")
        return str(path)

    def token_path(self) -> Path:
        """Path of the projected token; Kubernetes renews it in place."""
        return under_root(self.root, names.TOKEN_DIR) / names.TOKEN_FILE

    def worker_config(self, *, listen_host: str, state_dir: Path) -> WorkerConfig:
        """Configuration of this pod's trainer or sidecar. Raises: SpecError."""
        shared = under_root(self.root, names.SHARED_DIR)
        has_config_map = self.job.spec.trainer.program.config_map is not None
        return WorkerConfig(
            job_document=self.config.job_document,
            rank=self.worker().rank,
            coordinator_address=self.config.coordinator_address,
            authority_pem_path=self.authority_path(),
            token_path=str(self.token_path()),
            state_dir=str(state_dir),
            socket_path=str(shared / "sidecar.sock"),
            listen_host=listen_host,
            advertise_host=self.address(),
            data_root=str(under_root(self.root, names.DATA_DIR)),
            results_dir=str(under_root(self.root, names.STATE_DIR) / "results"),
            program_root=str(under_root(self.root, names.PROGRAM_DIR)) if has_config_map else "",
            exchange_port=names.EXCHANGE_PORT,
            measuring_port=names.MEASURING_PORT,
            keeper_address=self.config.keeper_address,
        )

    def _variable(self, name: str) -> str:
        value = self.environment.get(name, "")
        if not value:
            raise _invalid_value(name, value or "nothing", "set by the operator's Job")
        return value

    def _index(self) -> int:
        given = self._variable(names.INDEX_VARIABLE)
        if not (given.isascii() and given.isdigit()) or len(given) > 6:
            allowed = "the completion index of an Indexed Job"
            raise _invalid_value(names.INDEX_VARIABLE, given, allowed)
        return int(given)


def under_root(root: Path, path: str) -> Path:
    """An absolute path of a pod, moved below `root`."""
    return root / path.lstrip(os.sep)


def _invalid_value(variable: str, value: str, allowed: str) -> SpecError:
    return SpecError(
        [Problem(variable, "wrong value", value[:200], allowed)], source=POD_ENVIRONMENT
    )
