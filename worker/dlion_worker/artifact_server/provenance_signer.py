"""Signs the statement beside a site's model with the keeper's key.

The keeper signs only what its caller may state: its own run, site and name, and the digests of the
files that lie here. It adds the job's UID, its own clock and who is revoked.
"""

from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import JobKey, SiteName, WorkerIdentity
from dlion_api.protocol.provenance import (
    ProvenanceStatement,
    RevokedEntry,
    StatedRun,
    stated_digests,
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

        Raises: ContractError: it is malformed, or states another run, site or worker, or this
        keeper does not know the job's UID. UnavailableError: of other files than those that have
        arrived so far, or the keeper's certificate is not valid now. OSError.
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
        kept = stated_digests((self._folder / model_path(self._site)).parent)
        if statement.sha256 != kept:
            # The statement's own files may still be on their way, after a failed attempt.
            others = [name for name in kept if kept[name] != statement.sha256[name]]
            raise UnavailableError(f"statement of another {' and '.join(others)} than is kept here")
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
