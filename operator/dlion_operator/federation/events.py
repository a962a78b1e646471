"""The words between the federation's state machine and its skin: events in, instructions out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dlion_api.names import JobKey, SiteName
from dlion_operator.federation.reports import Statement


class RefusalReason(StrEnum):
    """Why another operator's stream was ended; docs/federation.md explains each."""

    BAD_CERTIFICATE = "BadCertificate"
    WRONG_SITE = "WrongSite"
    REPLACED = "Replaced"
    SILENT = "Silent"
    MALFORMED = "Malformed"
    TOO_MUCH = "TooMuch"


@dataclass(frozen=True)
class Greeted:
    """A site opened a stream; its certificate is its own. `stream` is the skin's number for it."""

    stream: int
    site: SiteName
    to_site: SiteName
    """Whom it takes this site for."""
    now_s: float


@dataclass(frozen=True)
class Told:
    """That stream brought a statement. `now_s` is any monotonic clock's."""

    stream: int
    statement: Statement
    now_s: float


Event = Greeted | Told


@dataclass(frozen=True)
class Refuse:
    """End the stream with this."""

    reason: RefusalReason
    message: str


@dataclass(frozen=True)
class News:
    """Another site's part in that run is not what it was."""

    run: JobKey


Instruction = Refuse | News
