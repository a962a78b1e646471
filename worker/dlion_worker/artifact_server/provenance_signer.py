"""Signs the statement beside a site's model with the keeper's key.

The keeper signs only what its caller may state: its own run, site and name, and the digest of the
model that lies here. It adds the job's UID, its own clock and who is revoked.
"""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from dlion_api.errors import ContractError
from dlion_api.names import JobKey, SiteName, WorkerIdentity
from dlion_api.protocol.provenance import (
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

        Raises: ContractError: it is malformed, or states another run, site, worker or model.
        """
        statement = ProvenanceStatement.from_json(content)
        stated = statement.provenance
        given = (replace(stated.run, uid=""), stated.site, stated.saved_by)
        allowed = (replace(self._run, uid=""), self._site, worker.name)
        if given != allowed:
            raise ContractError(f"statement of {given!r:.300}; allowed: {allowed}")
        if statement.model_sha256 != file_sha256(self._folder / model_path(self._site)):
            raise ContractError("statement of another model than the one that is kept here")
        provenance = replace(
            stated,
            run=self._run,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            revoked=tuple(
                RevokedEntry(*each)
                for each in sorted(self._revoked.reasons.items())[:MAX_REVOCATIONS]
            ),
        )
        payload = replace(statement, provenance=provenance).to_json()
        if not self._credentials.enabled:
            return payload
        return SignedEnvelope.sign(payload, self._credentials.sign).to_json()
