"""The settings of a keeper, made by `dlion_worker.pod`."""

from dataclasses import dataclass
from pathlib import Path

from dlion_api.names import KeeperIdentity, SiteName
from dlion_api.protocol.worker_config import COORDINATOR_DNS_NAME
from dlion_api.spec import Job


@dataclass(frozen=True)
class KeeperConfig:
    job: Job
    site: SiteName
    state_dir: Path
    """Mount point of the claim; the run's folder is below it."""
    coordinator_address: str
    authority_pem_path: str
    """CA bundle that verifies the coordinator's certificate; empty: plain text."""
    token_path: str
    proof_dir: Path
    """Folder of this pod alone for the key that signs its requests (see `make_pod_proof`)."""
    listen_host: str
    port: int
    job_uid: str = ""
    """UID of the DLionJob at this site."""
    coordinator_dns_name: str = COORDINATOR_DNS_NAME

    @property
    def identity(self) -> KeeperIdentity:
        return KeeperIdentity(self.site)

    @property
    def folder(self) -> Path:
        return self.state_dir / self.job.spec.run_id
