"""What a pod finds around itself, and the configuration that follows from it.

Owns the paths below a root (the file system's, or a test's), the environment variables and the
step from site, group and index to a rank. Called by `__main__`.
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
from dlion_api.pod_config import PodConfig
from dlion_api.spec import Job, load_job
from dlion_api.worker_config import WorkerConfig

SOURCE = "environment of the pod"


@dataclass(frozen=True)
class Pod:
    """One pod of a run."""

    root: Path
    environment: Mapping[str, str]
    config: PodConfig
    job: Job

    @classmethod
    def read(cls, root: Path, environment: Mapping[str, str]) -> Pod:
        """From the run's ConfigMap. Raises: SpecError, OSError."""
        path = below(root, names.CONFIG_DIR) / names.POD_CONFIG_KEY
        config = PodConfig.load(path)
        return cls(root, environment, config, load_job(config.job_document, source=str(path)))

    @property
    def site(self) -> SiteName:
        """The site that this pod runs at. Raises: SpecError where the manifest has none such."""
        sites = [site.name for site in self.job.spec.sites]
        if self.config.site not in sites:
            problem = Problem(
                "site", "is no site of the job", self.config.site, allowed=", ".join(sites)
            )
            raise SpecError([problem], source=names.POD_CONFIG_KEY)
        return SiteName(self.config.site)

    def worker(self) -> WorkerIdentity:
        """Which worker of the job this is. Raises: SpecError where the manifest has none such."""
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
            raise SpecError([problem], source=SOURCE) from error

    def address(self) -> str:
        """This pod's own IP address. Raises: SpecError."""
        given = self._variable(names.POD_IP_VARIABLE)
        try:
            return str(ipaddress.ip_address(given))
        except ValueError:
            raise _wrong(names.POD_IP_VARIABLE, given, "an IPv4 or IPv6 address") from None

    def everywhere(self) -> str:
        """The host that stands for all addresses of this pod, in the family of its own one."""
        if not self.environment.get(names.POD_IP_VARIABLE):
            return "::"
        return "::" if ":" in self.address() else "0.0.0.0"  # noqa: S104 - a pod's own network

    def authority_path(self) -> str:
        """The CA of the coordinator; empty: plain text. Raises: SpecError where it is missing.

        An operator's coordinator has TLS whatever the links between this job's workers have.
        """
        path = below(self.root, names.CONFIG_DIR) / names.AUTHORITY_KEY
        if not path.is_file():
            if self.job.spec.tls.mode == "Disabled":
                return ""
            problem = Problem(str(path), "is missing", advice="The operator puts it there")
            raise SpecError([problem], source=f"tls.mode {self.job.spec.tls.mode}")
        return str(path)

    def token_path(self) -> Path:
        """The projected token; it is renewed in its place."""
        return below(self.root, names.TOKEN_DIR) / names.TOKEN_FILE

    def worker_config(self, *, listen_host: str, state_dir: Path) -> WorkerConfig:
        """Of this pod's trainer or sidecar. Raises: SpecError."""
        shared, state = below(self.root, names.SHARED_DIR), below(self.root, names.STATE_DIR)
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
            data_root=str(below(self.root, names.DATA_DIR)),
            results_dir=str(state / "results"),
            program_root=str(below(self.root, names.PROGRAM_DIR)) if has_config_map else "",
            exchange_port=names.EXCHANGE_PORT,
            measuring_port=names.MEASURING_PORT,
            keeper_address=self.config.keeper_address,
        )

    def _variable(self, name: str) -> str:
        value = self.environment.get(name, "")
        if not value:
            raise _wrong(name, value or "nothing", "set by the operator's Job")
        return value

    def _index(self) -> int:
        given = self._variable(names.INDEX_VARIABLE)
        if not (given.isascii() and given.isdigit()) or len(given) > 6:
            raise _wrong(names.INDEX_VARIABLE, given, "the completion index of an Indexed Job")
        return int(given)


def below(root: Path, path: str) -> Path:
    """An absolute path of a pod, below that root."""
    return root / path.lstrip(os.sep)


def _wrong(variable: str, value: str, allowed: str) -> SpecError:
    return SpecError([Problem(variable, "wrong value", value[:200], allowed)], source=SOURCE)
