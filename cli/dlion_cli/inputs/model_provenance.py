"""Verifies the statement beside a saved model: whose updates it holds, and its signature.

Called by `fetch` before a file is replaced. Model and statement are untrusted; the authority's
certificates, the job and its revocations come from the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from dlion_api.errors import ContractError, DataError
from dlion_api.names import JobKey, KeeperIdentity, SiteName
from dlion_api.protocol.provenance import (
    MODEL_FILE,
    PROVENANCE_FILE,
    STATED_FILES,
    ModelProvenance,
    ProvenanceStatement,
    StatedRun,
    stated_digests,
)
from dlion_cli.terminal.formatting import printable

MAX_SHOWN: Final = 20
_MODEL_FILES: Final = (*STATED_FILES, PROVENANCE_FILE)
UNSIGNED_ADVICE: Final = (
    "If the run is still training, retry: its model may just be replaced. To accept a model "
    "without a signature, such as one of an earlier release, add --allow-unsigned"
)


class ProvenanceError(DataError):
    """A model is not the one that its statement describes, or has none that can be trusted."""


@dataclass(frozen=True)
class ExpectedOrigin:
    """Where models must come from."""

    job: JobKey
    uid: str
    """UID of the DLionJob."""
    authority_pem: Callable[[SiteName], bytes]
    """Certificates that verify a site's keeper. Raises: DLionError."""
    revoked: Collection[str]
    """Names of the workers and sites that are revoked now."""
    allows_unsigned: bool = False


@dataclass(frozen=True)
class VerifiedModel:
    """A model whose files are those that the statement names."""

    site: SiteName
    is_signed: bool
    sha256: str
    provenance: ModelProvenance | None
    """None: there is no statement, and the caller allows that."""

    def to_document(self) -> dict[str, Any]:
        return {
            "site": self.site,
            "signed": self.is_signed,
            "sha256": self.sha256,
            "provenance": None if self.provenance is None else asdict(self.provenance),
        }

    def lines(self) -> list[str]:
        """Text for users: who vouches for it, and whose updates it holds."""
        found = self.provenance
        if found is None:
            return [f"{self.site}: no statement names the workers whose updates the model holds"]
        count = len(found.workers)
        how = f"signed by {self.site}'s keeper" if self.is_signed else "not signed"
        saved = f"{found.model}, saved by {found.saved_by} at {found.saved_at}"
        lines = [f"{self.site}: {how}; {saved}; updates of {count} worker{'s' * (count != 1)}:"]
        for each in found.workers[:MAX_SHOWN]:
            figures = f"{each.samples:,} samples, to iteration {each.last_iteration:,}"
            note = ", revoked" if each.revoked else ""
            lines.append(f"  {each.worker}: {each.evidence}, {figures}{note}")
        lines += [f"  and {count - MAX_SHOWN} more"] if count > MAX_SHOWN else []
        lines += [f"  revoked: {each.name} ({each.reason or 'no reason given'})"
                  for each in found.revoked[:MAX_SHOWN]]  # fmt: skip
        return [printable(line) for line in lines]


def verify_received(
    received: Path, expected: ExpectedOrigin, *, site: SiteName | None
) -> list[VerifiedModel]:
    """Verify all models among the received files, which lie as in a result folder.

    `site`: the model of that site must be there, and no other file; None: a whole folder, which
    may have other files, but none below `models` and no other model. Raises: as `verify_model`.
    """
    found = {path.relative_to(received) for path in received.rglob("*") if path.is_file()}
    in_models = [path.parts for path in found if path.parts[0] == "models"]
    sites = sorted({SiteName(parts[1]) for parts in in_models if len(parts) == 3})
    sites = sites if site is None else [site]
    of_sites = {Path("models", each, name) for each in sites for name in _MODEL_FILES}
    others = [
        path
        for path in found - of_sites
        if site is not None or path.parts[0] == "models" or path.name == MODEL_FILE
    ]
    if others:
        names = printable(", ".join(sorted(map(str, others))[:5]))
        raise ProvenanceError(
            f"the keeper sends {names}, which no statement covers; nothing was changed"
        )
    return [verify_model(received / "models" / each, each, expected) for each in sites]


def verify_model(folder: Path, site: SiteName, expected: ExpectedOrigin) -> VerifiedModel:
    """Verify the model in that folder.

    Raises: ProvenanceError if a file, the statement, its signature or origin is wrong, or a
    statement or signature is missing and not allowed to be; OSError; and as
    `ExpectedOrigin.authority_pem`.
    """
    path = folder / PROVENANCE_FILE
    if missing := [name for name in STATED_FILES if not (folder / name).is_file()]:
        raise ProvenanceError(
            f"the keeper has no {' and no '.join(missing)} of {site}; nothing was changed. If the "
            "run is still training, retry"
        )
    digests = stated_digests(folder)
    digest = digests[MODEL_FILE]
    if not path.exists():
        if not expected.allows_unsigned:
            problem = f"the model of {site} has no statement ({PROVENANCE_FILE})"
            raise ProvenanceError(f"{problem}; nothing was changed. {UNSIGNED_ADVICE}")
        return VerifiedModel(site, False, digest, None)
    try:
        statement, is_signed = _read(path, site, expected)
        _check_origin(statement, digests, site, expected)
    except ContractError as error:
        raise ProvenanceError(
            f"the model of {site} is refused, and nothing was changed: {printable(str(error))}"
        ) from error
    return VerifiedModel(site, is_signed, digest, statement.provenance)


def _read(path: Path, site: SiteName, expected: ExpectedOrigin) -> tuple[ProvenanceStatement, bool]:
    """Return the statement, and whether it is signed. Raises: ContractError."""
    from dlion_worker.provenance.envelope import MAX_ENVELOPE_BYTES, SignedEnvelope

    with path.open("rb") as file:
        content = file.read(MAX_ENVELOPE_BYTES + 1)
    if b'"payloadType"' not in content and len(content) <= MAX_ENVELOPE_BYTES:
        statement = ProvenanceStatement.from_json(content)
        if not expected.allows_unsigned:
            raise ContractError(f"its statement is not signed. {UNSIGNED_ADVICE}")
        return statement, False
    envelope = SignedEnvelope.from_json(content)
    statement = ProvenanceStatement.from_json(envelope.payload)
    signer = KeeperIdentity(site).spiffe_id(expected.job)
    envelope.verify(expected.authority_pem(site), signer, statement.saved_at)
    return statement, True


def _check_origin(
    statement: ProvenanceStatement,
    digests: Mapping[str, str],
    site: SiteName,
    expected: ExpectedOrigin,
) -> None:
    """Raises: ContractError."""
    stated = statement.provenance
    for name, digest in digests.items():
        if (named := statement.sha256[name]) != digest:
            raise ContractError(
                f"{name} has SHA-256 {digest}, its statement {named}: one of them has been changed."
                " If the run is still training, retry"
            )
    job = expected.job
    if not stated.run.uid:
        raise ContractError("its statement names no DLionJob: the UID is empty")
    wanted = StatedRun(job.namespace, job.name, job.run_id, expected.uid)
    if (stated.run, stated.site) != (wanted, site):
        raise ContractError(f"its statement is of {stated.run} at {stated.site}; allowed: {wanted}")
    for name in (site, stated.saved_by):
        if name in expected.revoked:
            raise ContractError(
                f"{name}, which saved it, is revoked. Fetch the model at another site, or "
                "`dlion trust restore` it"
            )
