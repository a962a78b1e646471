"""Why a stream of another site's operator is refused."""

from enum import StrEnum


class FederationRefusalReason(StrEnum):
    """Why another operator's stream was refused; docs/several-sites.md explains each."""

    BAD_CERTIFICATE = "BadCertificate"
    WRONG_SITE = "WrongSite"
    REPLACED = "Replaced"
    SILENT = "Silent"
    MALFORMED = "Malformed"
    TOO_MUCH = "TooMuch"


class StreamRefusedError(Exception):
    """The stream is refused. `service` catches this and ends the stream with the reason."""

    def __init__(self, reason: FederationRefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
