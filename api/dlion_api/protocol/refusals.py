"""Reasons why a coordinator, worker or keeper refuses a call, sent in its trailing metadata.

The gRPC status alone does not determine what a worker should do; the reason does. Servers send it,
clients read it, and both count it. The spellings are API: documented, never renamed.
"""

from enum import StrEnum

from dlion_api.errors import ContractError


class RefusalReason(StrEnum):
    """Why a call was refused; each has one gRPC status."""

    BAD_TOKEN = "BadToken"  # noqa: S105 - not a password; the token is not this worker's
    REPLAYED_TOKEN = "ReplayedToken"  # noqa: S105 - not by its pod, or repeated
    WRONG_RUN = "WrongRun"  # the coordinator serves another run
    UNKNOWN_WORKER = "UnknownWorker"  # the manifest here has no such rank, site, group and index
    SPEC_DIFFERS = "SpecDiffers"  # the worker's manifest is not the coordinator's
    OLD_INCARNATION = "OldIncarnation"  # a newer start of this worker is known
    FINISHED = "Finished"  # this incarnation has reported its end
    NOT_JOINED = "NotJoined"  # this incarnation has not joined this coordinator
    MALFORMED = "Malformed"  # the message breaks the protocol
    TOO_MUCH = "TooMuch"  # more than a worker may send
    NO_AUTHORITY = "NoAuthority"  # the authority that the job names is unavailable
    REVOKED = "Revoked"  # the job's administrators have revoked it

    @property
    def passing(self) -> bool:
        """Whether the same call may be accepted later (a renewed token, an applied manifest)."""
        return self not in (
            RefusalReason.OLD_INCARNATION, RefusalReason.FINISHED, RefusalReason.MALFORMED
        )  # fmt: skip

    @property
    def ends_start(self) -> bool:
        """Whether a joined worker must end. A revoked one may not train on: its next start asks for
        a certificate, and waits until the revocation is lifted."""
        return self is RefusalReason.REVOKED or not self.passing


class PeerRefusal(StrEnum):
    """Why a worker or a keeper refused a caller; the caller itself detects the last three."""

    BAD_CERTIFICATE = "BadCertificate"  # not that worker's of this run, by its own site's authority
    WRONG_RUN = "WrongRun"  # the caller takes part in another run
    UNKNOWN_WORKER = "UnknownWorker"  # no such worker, or that rank is another's
    OLD_INCARNATION = "OldIncarnation"  # a newer start of this worker is known
    QUARANTINED = "Quarantined"  # it has violated the protocol too often
    REVOKED = "Revoked"  # the job's administrators have revoked it
    WRONG_RELEASE = "WrongRelease"  # another version of the protocol
    NOT_ITS_OWN = "NotItsOwn"  # a file of another worker or of none
    MALFORMED = "Malformed"  # the message violates the protocol
    IMPLAUSIBLE = "Implausible"  # the message claims what this worker knows to be impossible
    UNPROVEN = "Unproven"  # the server cannot prove that it is that peer
    NOT_BELIEVED = "NotBelieved"  # the server closed the handshake: it does not trust this caller
    UNKNOWN_AUTHORITY = "UnknownAuthority"  # no CA bundle of that peer's site


class CallerError(ContractError):
    """The caller is refused for this reason."""

    def __init__(self, kind: PeerRefusal, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def refusal_kind(error: Exception) -> PeerRefusal:
    """Return the reason for refusing the caller that caused that error.

    >>> str(refusal_kind(ContractError("frame of 9999999 bytes")))
    'Malformed'
    """
    return error.kind if isinstance(error, CallerError) else PeerRefusal.MALFORMED


REASON_KEY = "dlion-reason"
"""Trailing metadata: the `RefusalReason` or `PeerRefusal`."""

KNOWN_INCARNATION_KEY = "dlion-known-incarnation"
"""Trailing metadata with `OLD_INCARNATION`: the newest incarnation that the coordinator knows."""

MAX_RECORDS_PER_REPORT = 256
MAX_REPORT_BYTES = 1024 * 1024
"""One progress report, all records together."""
MAX_CSR_BYTES = 16 * 1024
MAX_TOKEN_BYTES = 8 * 1024
MAX_PROOF_BYTES = 256
"""Limit for a proof's public key and signature, each; EC P-256 needs less than half."""
MAX_TEXT_BYTES = 512
"""Addresses, names, hashes."""
