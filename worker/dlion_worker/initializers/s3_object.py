"""Signs requests for an object of an S3-compatible store, and explains how its server refuses them.

`obstore` makes the signature (docs/decisions/0057-initializers.md), `http_file` sends the request.
Keys, region and server come from the download's Secret alone: no variable, file or metadata service
of the machine is asked for them. obstore reads other `AWS_` variables, and refuses malformed ones.
"""

import os
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import TYPE_CHECKING, Final, Self

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from dlion_api.errors import DataError
from dlion_api.spec.initializers import Download

if TYPE_CHECKING:
    from obstore.store import S3Credential

EXPIRES_IN: Final = timedelta(minutes=15)
"""Life of a signature. The server checks it when a request begins, and each request has its own."""
MAX_SKEW: Final = timedelta(minutes=5)
"""Between two clocks. S3 refuses a signature from the future, and one that has expired."""
DEFAULT_REGION: Final = "us-east-1"
_REGION_FORM: Final = "[A-Za-z0-9-]{1,64}"
_ENDPOINT_FORM: Final = (
    r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]*)?"
)
_ERROR_CODE: Final = re.compile(rb"<Code>([A-Za-z0-9.]{1,64})</Code>")
_WRONG_KEYS: Final = "Correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_WRONG_REGION: Final = "Correct AWS_REGION, which must be the bucket's"
_EXPIRED: Final = "Renew AWS_SESSION_TOKEN with its keys"
_ADVICE: Final[Mapping[str, str]] = {
    "NoSuchBucket": "Correct the bucket, or AWS_ENDPOINT_URL",
    "NoSuchKey": "Correct the key",
    "InvalidAccessKeyId": _WRONG_KEYS,
    "SignatureDoesNotMatch": _WRONG_KEYS,
    "ExpiredToken": _EXPIRED,
    "InvalidToken": _EXPIRED,
    "PermanentRedirect": _WRONG_REGION,
    "AuthorizationQueryParametersError": _WRONG_REGION,
    "InvalidRegion": _WRONG_REGION,
    "AccessDenied": "Give the key the right s3:GetObject. The object may also be missing",
    "RequestTimeTooSkewed": "Set the clock of this machine, or the server's",
    "InvalidObjectState": "Restore the object from the archive first",
}
"""What to do, by the error codes of S3."""
_CLOCK_CODES: Final = frozenset({"AccessDenied", "SignatureDoesNotMatch", "RequestTimeTooSkewed"})
"""What a server may answer where one of the two clocks is wrong."""
_ADVICE_WITHOUT_CODE: Final = (
    "This is not an answer of S3. Correct AWS_ENDPOINT_URL, http:// or https:// included"
)


@dataclass(frozen=True)
class S3Object:
    """An object, and how to reach it."""

    bucket: str
    key: str
    secret_name: str
    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str = field(repr=False)
    region: str
    endpoint: str
    """URL of the server, which gets the bucket as the first part of the path."""

    @classmethod
    def of(cls, download: Download, credentials: Mapping[str, str]) -> Self:
        """Return the object of an s3:// download. `credentials` are keyed by the Secret's keys.

        Raises: DataError if one of them, or the address, cannot be right.
        """
        bucket, _, quoted = download.url.partition("://")[2].partition("/")
        key = urllib.parse.unquote(quoted)
        if {"", ".", ".."} & set(key.split("/")) or not key.isprintable():
            raise DataError(
                f"{download.url}: a key with an empty part, . or .., or an unprintable character "
                "cannot be asked for. Correct the address, or rename the object"
            )
        region = credentials["AWS_REGION"] or DEFAULT_REGION
        endpoint = credentials["AWS_ENDPOINT_URL"] or f"https://s3.{region}.amazonaws.com"
        for name, value, form, allowed in (
            ("AWS_REGION", region, _REGION_FORM, "letters, digits and hyphens"),
            ("AWS_ENDPOINT_URL", endpoint, _ENDPOINT_FORM, "http:// or https:// and a host"),
        ):
            if re.fullmatch(form, value) is None:
                raise DataError(
                    f"Secret {download.secret_name}: {name} is malformed; allowed: {allowed}. "
                    "Correct it"
                )
        return cls(
            bucket,
            key,
            download.secret_name,
            credentials["AWS_ACCESS_KEY_ID"],
            credentials["AWS_SECRET_ACCESS_KEY"],
            credentials["AWS_SESSION_TOKEN"],
            region,
            endpoint.rstrip("/"),
        )

    def signed_url(self) -> str:
        """Return a URL that gets the object, for the next minutes.

        Raises: DataError if obstore refuses the server's address, or a variable of the machine.
        """
        try:
            return obstore.sign(self._store, "GET", self.key, EXPIRES_IN)
        except BaseError as error:
            what = str(error).partition("\n")[0]
            given = ", ".join(sorted(name for name in os.environ if name.startswith("AWS_")))
            unset = f", or unset a wrong one of the variables {given}" if given else ""
            raise DataError(
                f"s3://{self.bucket}/{self.key}: no request can be made: {what}. Correct "
                f"AWS_ENDPOINT_URL in Secret {self.secret_name}{unset}"
            ) from None

    @cached_property
    def _store(self) -> S3Store:
        """What decides on a request is given here: variables of the machine do not count."""
        return S3Store(
            self.bucket,
            region=self.region,
            endpoint=self.endpoint,
            aws_endpoint_url_s3=self.endpoint,
            virtual_hosted_style_request=False,
            skip_signature=False,
            s3_express=False,
            request_payer=False,
            client_options={"allow_http": True},
            credential_provider=self._credential,
        )

    def _credential(self) -> "S3Credential":
        return {
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
            "token": self.session_token or None,
            "expires_at": None,
        }

    def explain(self, answer: bytes, server_time: str) -> str:
        """Return the server's error code and what to do about it.

        `answer` is the body of a refusal, `server_time` its Date header.
        """
        match = _ERROR_CODE.search(answer)
        if match is None:
            return f"{_ADVICE_WITHOUT_CODE} (Secret {self.secret_name})"
        code = match[1].decode()
        if code in _CLOCK_CODES and (advice := _clock_advice(server_time)):
            return f"{code}. {advice}"
        advice = _ADVICE.get(code, "Correct the address or the keys")
        return f"{code}. {advice} (Secret {self.secret_name})"


def _clock_advice(server_time: str) -> str:
    try:
        skew = datetime.now(UTC) - parsedate_to_datetime(server_time)
    except (TypeError, ValueError):  # no time, or one without a zone
        return ""
    if abs(skew) <= MAX_SKEW:
        return ""
    side = "ahead of" if skew > timedelta() else "behind"
    return f"The clock here is {abs(skew).total_seconds():.0f} s {side} the server's: set it"
