"""What a keeper is told at its start. Made by `dlion_worker.pod`, used by `process`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dlion_api.names import KeeperIdentity, SiteName
from dlion_api.spec import Job
from dlion_api.worker_config import COORDINATOR_DNS_NAME


@dataclass(frozen=True)
class KeeperConfig:
    """One site's keeper of one run."""

    job: Job
    site: SiteName
    state_dir: Path
    """Where the claim is mounted; the run's folder is below it."""
    coordinator_address: str
    authority_pem_path: str
    """CA bundle that the coordinator's certificate is held against; empty: plain text."""
    token_path: str
    proof_dir: Path
    """Of this pod alone: where the key is kept that proves whose token is shown."""
    listen_host: str
    port: int
    coordinator_dns_name: str = COORDINATOR_DNS_NAME

    @property
    def identity(self) -> KeeperIdentity:
        """Who this keeper is."""
        return KeeperIdentity(self.site)

    @property
    def folder(self) -> Path:
        """The run's result folder."""
        return self.state_dir / self.job.spec.run_id
