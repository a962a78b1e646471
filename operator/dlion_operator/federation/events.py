"""Events that the federation's state machine handles, and the instructions it returns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dlion_api.names import JobKey, SiteName
from dlion_operator.federation.reports import Statement


class FederationRefusalReason(StrEnum):
    """Why another operator's stream was refused; docs/several-sites.md explains each."""

    BAD_CERTIFICATE = "BadCertificate"
    WRONG_SITE = "WrongSite"
    REPLACED = "Replaced"
    SILENT = "Silent"
    MALFORMED = "Malformed"
    TOO_MUCH = "TooMuch"


@dataclass(frozen=True)
class StreamOpened:
    """A site with a verified certificate opened a stream, which `service` numbers as `stream`."""

    stream: int
    site: SiteName
    to_site: SiteName
    """The site that the caller meant to reach."""
    now_s: float


@dataclass(frozen=True)
class StatementReceived:
    """A statement arrived on that stream. `now_s` is a monotonic time."""

    stream: int
    statement: Statement
    now_s: float


Event = StreamOpened | StatementReceived


@dataclass(frozen=True)
class RefuseStream:
    """End the stream with this reason."""

    reason: FederationRefusalReason
    message: str


@dataclass(frozen=True)
class RunChanged:
    """Another site's report of that run has changed."""

    run: JobKey


Instruction = RefuseStream | RunChanged
