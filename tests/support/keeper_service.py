"""A keeper's service on a real port with mutual TLS, and its callers, in one process."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from dlion_api.names import JobKey, KeeperIdentity, SiteName, WorkerIdentity
from dlion_api.spec import Job, load_job
from dlion_operator.pki.authority import CertificateAuthority
from dlion_worker.artifact_client import ArtifactClient
from dlion_worker.artifact_server.process import make_server
from dlion_worker.artifact_server.provenance_signer import ProvenanceSigner
from dlion_worker.artifact_server.service import ArtifactService, UploadRejections
from dlion_worker.artifact_server.store import ArtifactStore
from dlion_worker.artifact_server.workers import (
    REVOKED_FILE,
    WORKERS_FILE,
    RevokedWorkers,
    SiteWorkerRegistry,
)
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey
from local_run import job_document

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PLANT_A, PLANT_B = SiteName("plant-a"), SiteName("plant-b")
DISK_THREADS = 2
UID = "u-1"
"""The UID of the DLionJob."""
AUTHORITIES = {site: CertificateAuthority(site) for site in (PLANT_A, PLANT_B)}


def job() -> Job:
    return load_job(job_document({PLANT_A: 2, PLANT_B: 1}))


def proof(who: WorkerIdentity | KeeperIdentity, run: JobKey | None = None) -> WorkerCredentials:
    """A certificate of that worker's coordinator; all sites' authorities are known."""
    key = WorkerKey()
    chain = AUTHORITIES[who.site].sign(key.csr_pem(), who, run or job().key)
    return WorkerCredentials(key, chain, {s: a.bundle_pem for s, a in AUTHORITIES.items()})


class Keeper:
    """The service in a thread with a loop, on a fixed port."""

    def __init__(self, folder: Path, *, knows_revoked: bool = True) -> None:
        self.folder = folder
        self.port = 0
        self.refusals = UploadRejections()
        self.revoked = RevokedWorkers(folder, is_over=False)
        if knows_revoked:
            self.revoked.set(())
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(DISK_THREADS))
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.start()

    def start(self) -> None:
        self._run(self._start())

    def stop(self) -> None:
        self._run(self._server.stop(0))

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def client(self, rank: int, incarnation: int = 1) -> ArtifactClient:
        worker = job().workers()[rank]
        return ArtifactClient(
            self.address, job=job().key, worker=worker, incarnation=incarnation,
            credentials=proof(worker),
        )  # fmt: skip

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def files(self) -> dict[str, int]:
        """All files on the disk, including temporary files, with their lengths."""
        own = (WORKERS_FILE, REVOKED_FILE)
        found = (p for p in self.folder.rglob("*") if p.is_file() and p.name not in own)
        return {str(path.relative_to(self.folder)): path.stat().st_size for path in found}

    def waiting_files(self, path: str) -> list[int]:
        """The lengths of files that have not replaced that one yet."""
        lengths = []
        for partial in (self.folder / path).parent.glob(".arriving-*"):
            with suppress(FileNotFoundError):  # it has replaced that file, or was discarded
                lengths.append(partial.stat().st_size)
        return lengths

    @contextmanager
    def storing(self, folder: str) -> Iterator[None]:
        """Act as if the keeper were storing another file of that folder."""
        lock = self.service._locks[folder]
        self._run(lock.acquire())
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(lock.release)

    def is_cancelling(self) -> bool:
        """Whether a call has been cancelled and has not ended."""
        return any(task.cancelling() for task in asyncio.all_tasks(self._loop))

    async def _start(self) -> None:
        credentials = proof(KeeperIdentity(PLANT_A))
        workers = SiteWorkerRegistry(self.folder, job(), PLANT_A)
        self.service = ArtifactService(
            job().key,
            workers,
            ArtifactStore(self.folder),
            credentials,
            self.refusals,
            self.revoked,
            ProvenanceSigner(job().key, UID, PLANT_A, self.folder, credentials, self.revoked),
        )
        self._server = make_server(self.service)
        secure = credentials.server()
        assert secure is not None
        self.port = self._server.add_secure_port(f"127.0.0.1:{self.port}", secure)
        await self._server.start()

    def _run(self, coroutine: object) -> object:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)  # type: ignore[arg-type]
