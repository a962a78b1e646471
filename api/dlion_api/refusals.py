"""Why a coordinator refuses a worker's call, and a worker or keeper a peer's, as said in the call's
trailing metadata.

A status code alone does not tell a worker what to do; the reason does. Raised by whoever serves,
read by whoever calls, and counted by both. The spellings are API: documented, never renamed.
"""

from __future__ import annotations

from enum import StrEnum

from dlion_api.errors import ContractError


class RefusalReason(StrEnum):
    """Why a call was refused; each has one gRPC status."""

    BAD_TOKEN = "BadToken"  # noqa: S105 - not a password; the token is not this worker's
    REPLAYED_TOKEN = "ReplayedToken"  # noqa: S105 - not by its pod, or once more
    WRONG_RUN = "WrongRun"  # the coordinator serves another run
    UNKNOWN_WORKER = "UnknownWorker"  # no such rank, site, group and index in the manifest here
    SPEC_DIFFERS = "SpecDiffers"  # the worker's manifest is not the coordinator's
    OLD_INCARNATION = "OldIncarnation"  # a newer start of this worker is known
    FINISHED = "Finished"  # this incarnation has said that it ended
    NOT_JOINED = "NotJoined"  # the coordinator does not know this incarnation (yet)
    MALFORMED = "Malformed"  # the message breaks the protocol
    TOO_MUCH = "TooMuch"  # more than a worker may send
    NO_AUTHORITY = "NoAuthority"  # nothing to sign with: the authority that the job names is away

    @property
    def passing(self) -> bool:
        """Whether the same call may be accepted later (a renewed token, an applied manifest)."""
        return self not in (
            RefusalReason.OLD_INCARNATION, RefusalReason.FINISHED, RefusalReason.MALFORMED
        )  # fmt: skip


class PeerRefusal(StrEnum):
    """Why a worker or a keeper refused a caller; the last three are the caller's own finding."""

    BAD_CERTIFICATE = "BadCertificate"  # not that worker's of this run, by its own site's authority
    WRONG_RUN = "WrongRun"  # the caller takes part in another run
    UNKNOWN_WORKER = "UnknownWorker"  # no such worker, or that rank is another's
    OLD_INCARNATION = "OldIncarnation"  # a newer start of this worker is known
    QUARANTINED = "Quarantined"  # it has broken the protocol too often
    WRONG_RELEASE = "WrongRelease"  # another version of the protocol
    NOT_ITS_OWN = "NotItsOwn"  # a file that is another's, or nobody's
    MALFORMED = "Malformed"  # what came breaks the protocol
    UNPROVEN = "Unproven"  # what answers cannot prove that it is that peer
    NOT_BELIEVED = "NotBelieved"  # what answers closes in the handshake: it believes not this one
    UNKNOWN_AUTHORITY = "UnknownAuthority"  # nothing is known to believe that peer's site by


class CallerError(ContractError):
    """A caller is refused for that reason."""

    def __init__(self, kind: PeerRefusal, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def kind_of(error: Exception) -> PeerRefusal:
    """Why whoever made that error is refused.

    >>> str(kind_of(ContractError("frame of 9999999 bytes")))
    'Malformed'
    """
    return error.kind if isinstance(error, CallerError) else PeerRefusal.MALFORMED


REASON_KEY = "dlion-reason"
"""Trailing metadata: the `RefusalReason` or `PeerRefusal`."""

KNOWN_INCARNATION_KEY = "dlion-known-incarnation"
"""Trailing metadata beside `OLD_INCARNATION`: the newest incarnation that the coordinator knows."""

MAX_RECORDS_PER_REPORT = 256
MAX_REPORT_BYTES = 1024 * 1024
"""One progress report, all records together."""
MAX_CSR_BYTES = 16 * 1024
MAX_TOKEN_BYTES = 8 * 1024
MAX_PROOF_BYTES = 256
"""Public key and signature of a proof, each; those of EC P-256 take less than half."""
MAX_TEXT_BYTES = 512
"""Addresses, names, hashes."""
