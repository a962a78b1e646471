"""Signs the statement beside a site's model with the keeper's key.

The keeper signs only what its caller may state: its own run, site and name, and the digests of the
files that lie here. It adds the job's UID, its own clock and which workers are revoked.
"""

from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path

from dlion_api.errors import ContractError
from dlion_api.names import JobKey, SiteName, WorkerIdentity
from dlion_api.protocol.provenance import (
    STATED_FILES,
    ProvenanceStatement,
    RevokedEntry,
    StatedRun,
    file_sha256,
)
from dlion_api.protocol.revocation import MAX_REVOCATIONS
from dlion_worker.artifact_client.paths import model_path
from dlion_worker.artifact_server.workers import RevokedWorkers
from dlion_worker.provenance.envelope import SignedEnvelope
from dlion_worker.security.credentials import WorkerCredentials


class ProvenanceSigner:
    """Signs for one run at one site."""

    def __init__(
        self,
        job: JobKey,
        uid: str,
        site: SiteName,
        folder: Path,
        credentials: WorkerCredentials,
        revoked: RevokedWorkers,
    ) -> None:
        self._run = StatedRun(job.namespace, job.name, job.run_id, uid)
        self._site, self._folder = site, folder
        self._credentials, self._revoked = credentials, revoked

    def signed(self, content: bytes, worker: WorkerIdentity) -> bytes:
        """Return the worker's statement, signed; without TLS there is no key, and it stays as is.

        Raises: ContractError: it is malformed, or states another run, site or worker, or other
        files than lie here, or this keeper does not know the job's UID. UnavailableError: the
        keeper's certificate is not valid now. OSError.
        """
        if not self._run.uid:
            raise ContractError(
                "the keeper does not know the DLionJob's UID, so it signs no statement; upgrade the"
                " operator and start another run"
            )
        statement = ProvenanceStatement.from_json(content)
        stated = statement.provenance
        given = (replace(stated.run, uid=""), stated.site, stated.saved_by)
        allowed = (replace(self._run, uid=""), self._site, worker.name)
        if given != allowed:
            raise ContractError(f"statement of {given!r:.300}; allowed: {allowed}")
        others = [
            name for name, sha256 in statement.sha256.items() if self._kept_sha256(name) != sha256
        ]
        if others:
            raise ContractError(f"statement of another {' and '.join(others)} than is kept here")
        now = datetime.now(UTC).replace(microsecond=0)
        provenance = replace(
            stated,
            run=self._run,
            saved_at=now.isoformat(),
            revoked=tuple(
                RevokedEntry(*each)
                for each in sorted(self._revoked.reasons.items())[:MAX_REVOCATIONS]
            ),
        )
        payload = replace(statement, provenance=provenance).to_json()
        if not self._credentials.enabled:
            return payload
        return SignedEnvelope.sign(payload, partial(self._credentials.sign, now=now)).to_json()

    def _kept_sha256(self, name: str) -> str:
        """Hash of the stored file; empty: there is none. Raises: OSError."""
        path = (self._folder / model_path(self._site)).with_name(name)
        try:
            found = path.stat()
        except FileNotFoundError:
            return ""
        return _sha256_of_version(path, (found.st_ino, found.st_size, found.st_ctime_ns))


@lru_cache(maxsize=len(STATED_FILES))
def _sha256_of_version(path: Path, _version: tuple[int, ...]) -> str:
    """Hash a model of up to 4 GiB once, also if its statement is sent again."""
    return file_sha256(path)
