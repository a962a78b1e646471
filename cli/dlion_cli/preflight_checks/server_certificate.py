"""Checks of the certificate that a site's operator presents: its names, validity and clock.

Called by `site_probe` after a handshake, which verifies the certificate itself. Pure.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Final

from cryptography import x509

from dlion_api.errors import ContractError
from dlion_api.names import OperatorIdentity, SiteName
from dlion_api.protocol.trust import CLOCK_SKEW_ALLOWANCE
from dlion_cli.inputs.listed_sites import TrustedSite
from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from dlion_cli.terminal.formatting import format_duration, printable

WRONG_SERVER_ADVICE: Final = "Check what listens there: proxies between sites must pass TLS through"
_GATEWAY_ADVICE: Final = "; a gateway presents its own certificate if it has no route for {name}"
_ANY_OPERATOR: Final = OperatorIdentity(SiteName("*")).dns_name
_ROUNDING: Final = timedelta(seconds=2)
"""Certificates have whole seconds."""
_RENEWAL_DELAY: Final = timedelta(minutes=1)
"""Operators check for due renewals every few seconds."""
_MAX_NOT_BEFORE: Final = datetime.max.replace(tzinfo=UTC) - CLOCK_SKEW_ALLOWANCE
"""Maximum of `notBefore`: with later values the time of issue would overflow."""
_MAX_NAMES_CHARS: Final = 120
_UPDATE_BUNDLE_ADVICE: Final = (
    "Run `dlion trust show` at {site}, compare the fingerprint out of band, add the output to the "
    "list and upgrade every site with it"
)


@dataclass(frozen=True)
class PresentedCertificate:
    """The relevant fields of a certificate."""

    names: tuple[str, ...]
    """DNS names."""
    not_before: datetime
    not_after: datetime

    @property
    def issued(self) -> datetime:
        """The time of issue by the operator's clock."""
        return self.not_before + CLOCK_SKEW_ALLOWANCE

    @property
    def renewal_deadline(self) -> datetime:
        """The latest time, by the operator's clock, at which it presents a newer certificate."""
        # Earlier releases renew after two thirds of the lifetime, this one after half of it.
        return self.issued + (self.not_after - self.issued) * 2 / 3


def read_certificate(der: bytes) -> PresentedCertificate:
    """Parse a DER certificate. Raises: ContractError."""
    try:
        certificate = x509.load_der_x509_certificate(der)
        not_before, not_after = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    except Exception as error:  # cryptography has no common error class
        raise ContractError(f"a certificate that cannot be read: {error}") from error
    if not_before > _MAX_NOT_BEFORE:
        raise ContractError(f"a certificate that is valid only from {not_before:%Y-%m-%d} UTC")
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        names = extension.value.get_values_for_type(x509.DNSName)
    except Exception:  # noqa: BLE001 - as above; operators' certificates have names
        names = []
    return PresentedCertificate(tuple(names), not_before, not_after)


def trusted_certificate_check(site: TrustedSite, presented: PresentedCertificate) -> Check:
    """The check for a certificate that the site's bundle verifies."""
    name = OperatorIdentity(SiteName(site.name)).dns_name
    observed = f"{name} by its authority, until {presented.not_after:%Y-%m-%d %H:%M} UTC"
    return Check(site.name, "tls", CheckOutcome.OK, observed)


def untrusted_certificate_checks(
    site: TrustedSite, presented: PresentedCertificate, now: datetime, why: str
) -> list[Check]:
    """The checks for a certificate that the bundle does not verify; `why`: the TLS error."""
    expected = OperatorIdentity(SiteName(site.name)).dns_name
    if expected not in presented.names:
        shown = ", ".join(presented.names[:3])[:_MAX_NAMES_CHARS]
        observed = f"a certificate for {printable(shown) or 'no name'}, and not for {expected}"
        advice = WRONG_SERVER_ADVICE + _GATEWAY_ADVICE.format(name=expected)
        if any(fnmatchcase(name, _ANY_OPERATOR) for name in presented.names):
            advice = f"Correct the address of {site.name} in the list, or the site.name there"
        return [_tls_failure(site, observed, advice)]
    if presented.not_before > now + _ROUNDING:
        since = f"{presented.not_before:%Y-%m-%d %H:%M:%S} UTC"
        failure = _tls_failure(site, f"its certificate is valid only from {since}", _CLOCK_ADVICE)
        return [failure, certificate_clock_check(site, presented, now)]
    if presented.not_after < now:
        observed = f"its certificate expired on {presented.not_after:%Y-%m-%d %H:%M} UTC"
        advice = (
            f"Check the log of the operator of {site.name}, which should renew it. {_CLOCK_ADVICE}"
        )
        return [_tls_failure(site, observed, advice), certificate_clock_check(site, presented, now)]
    observed = f"{expected} by another authority than the listed one ({printable(why)})"
    return [_tls_failure(site, observed, _UPDATE_BUNDLE_ADVICE.format(site=site.name))]


_CLOCK_ADVICE: Final = "Synchronize the clocks of site and machine by NTP"


def certificate_clock_check(
    site: TrustedSite, presented: PresentedCertificate, now: datetime
) -> Check:
    """Bounds for the site's clock relative to this machine's.

    The site's clock lies between the certificate's issue and the next one's. For certificates with
    a lifetime of hours, the bounds are wide and the outcome is UNKNOWN.
    """
    ahead_at_least, ahead_at_most = presented.issued - now, presented.renewal_deadline - now
    figures = {
        "clock_ahead_at_least_s": ahead_at_least.total_seconds(),
        "clock_ahead_at_most_s": ahead_at_most.total_seconds(),
    }
    if ahead_at_least > _ROUNDING:
        outcome = CheckOutcome.FAIL if ahead_at_least >= CLOCK_SKEW_ALLOWANCE else CheckOutcome.WARN
        observed = (
            f"at least {_format_span(ahead_at_least)} ahead of this machine's: its certificate "
            "was issued in the future"
        )
        return Check(site.name, "clock", outcome, observed, _CLOCK_ADVICE, figures)
    if ahead_at_most < -_RENEWAL_DELAY:
        late = _format_span(-ahead_at_most)
        observed = (
            f"at least {late} behind this machine's, or its operator does not renew its "
            "certificate, which is overdue"
        )
        advice = (
            f"{_CLOCK_ADVICE}, or check the log of the operator of {site.name} for failed renewals"
        )
        return Check(site.name, "clock", CheckOutcome.WARN, observed, advice, figures)
    observed = (
        f"between {_format_span(-ahead_at_least)} behind and {_format_span(ahead_at_most)} ahead "
        "of this machine's, according to its certificate"
    )
    certain = max(-ahead_at_least, ahead_at_most) < CLOCK_SKEW_ALLOWANCE
    advice = (
        ""
        if certain
        else "For narrower bounds, query its cluster (--contexts), or compare `date -u` at both"
    )
    outcome = CheckOutcome.OK if certain else CheckOutcome.UNKNOWN
    return Check(site.name, "clock", outcome, observed, advice, figures)


def _tls_failure(site: TrustedSite, observed: str, advice: str) -> Check:
    return Check(site.name, "tls", CheckOutcome.FAIL, observed, advice)


def _format_span(span: timedelta) -> str:
    """Hours, minutes and seconds; 0:00 for negative spans."""
    return format_duration(max(0.0, span.total_seconds()))
