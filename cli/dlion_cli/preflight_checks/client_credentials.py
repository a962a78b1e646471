"""Checks how long a user's credentials are valid: a token's or a client certificate's times.

Called by `dlion doctor`. The API server only rejects them. Pure; prints no secret.
"""

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509

from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from dlion_cli.terminal.formatting import format_duration

_SOON: Final = timedelta(hours=1)
_LOG_IN: Final = "Log in again, or take a new kubeconfig"
_CLOCK: Final = "Synchronize this machine's clock by NTP, or take a new kubeconfig"


def credentials_check(site: str, token: str, certificate: bytes, now: datetime) -> Check:
    """The check of a bearer token or a PEM certificate; both may be empty."""
    if token:
        return _check(site, "token", *_token_times(token), now)
    if certificate:
        try:
            found = x509.load_pem_x509_certificate(certificate)
        except Exception as error:  # noqa: BLE001 - cryptography has no common error class
            observed = f"its client certificate cannot be read: {error}"
            return Check(site, "credentials", CheckOutcome.FAIL, observed, _LOG_IN)
        times = found.not_valid_before_utc, found.not_valid_after_utc
        return _check(site, "client certificate", *times, now)
    observed = "neither a token nor a client certificate"
    return Check(site, "credentials", CheckOutcome.UNKNOWN, observed)


def _check(
    site: str, kind: str, begins: datetime | None, ends: datetime | None, now: datetime
) -> Check:
    if begins is not None and begins > now:
        observed = f"the {kind} is valid only from {begins:%Y-%m-%d %H:%M:%S} UTC"
        return Check(site, "credentials", CheckOutcome.FAIL, observed, _CLOCK)
    if ends is None:
        return Check(site, "credentials", CheckOutcome.OK, f"a {kind} without a known expiry")
    figures = {"valid_for_s": (ends - now).total_seconds()}
    if ends <= now:
        ago = format_duration((now - ends).total_seconds())
        observed = f"the {kind} expired on {ends:%Y-%m-%d %H:%M:%S} UTC, {ago} ago"
        return Check(site, "credentials", CheckOutcome.FAIL, observed, _LOG_IN, figures)
    observed = f"the {kind} is valid until {ends:%Y-%m-%d %H:%M} UTC"
    if ends - now < _SOON:
        return Check(site, "credentials", CheckOutcome.WARN, observed, _LOG_IN, figures)
    return Check(site, "credentials", CheckOutcome.OK, observed, figures=figures)


def _token_times(token: str) -> tuple[datetime | None, datetime | None]:
    """`nbf` and `exp` of a JWT, which is not verified; None where it has none."""
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        times = [claims.get(name) for name in ("nbf", "exp")]
        begins, ends = (
            None if each is None else datetime.fromtimestamp(each, UTC) for each in times
        )
    except (ValueError, IndexError, TypeError, AttributeError, OverflowError, OSError):
        return None, None  # no JWT
    return begins, ends
