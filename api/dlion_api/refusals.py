"""Why a coordinator refuses a worker's call, as said in the call's trailing metadata.

A status code alone does not tell a worker what to do; the reason does. Raised by the operator's
coordinator, read by the worker's client. The spellings are API: documented, never renamed.
"""

from __future__ import annotations

from enum import StrEnum


class RefusalReason(StrEnum):
    """Why a call was refused; each has one gRPC status."""

    BAD_TOKEN = "BadToken"  # noqa: S105 - not a password; the token is not this worker's
    WRONG_RUN = "WrongRun"  # the coordinator serves another run
    UNKNOWN_WORKER = "UnknownWorker"  # no such rank, site, group and index in the manifest here
    SPEC_DIFFERS = "SpecDiffers"  # the worker's manifest is not the coordinator's
    OLD_INCARNATION = "OldIncarnation"  # a newer start of this worker is known
    FINISHED = "Finished"  # this incarnation has said that it ended
    NOT_JOINED = "NotJoined"  # the coordinator does not know this incarnation (yet)
    MALFORMED = "Malformed"  # the message breaks the protocol
    TOO_MUCH = "TooMuch"  # more than a worker may send

    @property
    def passing(self) -> bool:
        """Whether the same call may be accepted later (a renewed token, an applied manifest)."""
        return self not in (
            RefusalReason.OLD_INCARNATION, RefusalReason.FINISHED, RefusalReason.MALFORMED
        )  # fmt: skip


REASON_KEY = "dlion-reason"
"""Trailing metadata: the `RefusalReason`."""

KNOWN_INCARNATION_KEY = "dlion-known-incarnation"
"""Trailing metadata beside `OLD_INCARNATION`: the newest incarnation that the coordinator knows."""

MAX_RECORDS_PER_REPORT = 256
MAX_REPORT_BYTES = 1024 * 1024
"""One progress report, all records together."""
MAX_CSR_BYTES = 16 * 1024
MAX_TOKEN_BYTES = 8 * 1024
MAX_TEXT_BYTES = 512
"""Addresses, names, hashes."""
