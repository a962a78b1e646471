"""The certificate that a site's operator presents: whose it is, and what it tells of clocks.

Called by `site_dialling` with what a handshake brought. Pure; whether a bundle vouches for it has
been judged by the handshake itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from cryptography import x509

from dlion_api.errors import ContractError
from dlion_api.names import OperatorIdentity, SiteName
from dlion_api.trust import BACKDATED
from dlion_cli.checks import Check, Outcome
from dlion_cli.figures import duration, printable

if TYPE_CHECKING:
    from dlion_cli.listed_sites import TrustedSite

NOT_OURS: Final = (
    "See what listens there: between sites nothing may end TLS (a proxy has to pass it through)"
)
_NO_ROUTE: Final = "; a gateway shows a certificate of its own where it has no route for {name}"
_ANY_OPERATOR: Final = OperatorIdentity(SiteName("*")).dns_name
_ROUNDING: Final = timedelta(seconds=2)
"""Certificates know whole seconds."""
_RENEWED_WITHIN: Final = timedelta(minutes=1)
"""From the moment that a renewal is due; operators look every few seconds."""
_LAST_BEGIN: Final = datetime.max.replace(tzinfo=UTC) - BACKDATED
"""Of a certificate that begins later no time can be told at which it was made."""
_MOST_WORDS: Final = 120
_SHOW: Final = (
    "Run `dlion trust show` at {site}, compare the fingerprint by another way, put it into the "
    "list and upgrade every site with it"
)


@dataclass(frozen=True)
class Presented:
    """What stands in a certificate."""

    names: tuple[str, ...]
    """Its DNS names."""
    begins: datetime
    ends: datetime

    @property
    def made(self) -> datetime:
        """When an operator made it, by its own clock."""
        return self.begins + BACKDATED

    @property
    def renewed_by(self) -> datetime:
        """When its operator presents a newer one at the latest, by its own clock: so late does one
        of an earlier release, this one's when half of its life has passed."""
        return self.made + (self.ends - self.made) * 2 / 3


def read_presented(der: bytes) -> Presented:
    """What stands in that certificate.

    Raises: ContractError where it cannot be read, or begins when time ends.
    """
    try:
        certificate = x509.load_der_x509_certificate(der)
        begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    except Exception as error:  # what cryptography raises for odd certificates has no common class
        raise ContractError(f"a certificate that cannot be read: {error}") from error
    if begins > _LAST_BEGIN:
        raise ContractError(f"a certificate that is valid from {begins:%Y-%m-%d} UTC only")
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        names = extension.value.get_values_for_type(x509.DNSName)
    except Exception:  # noqa: BLE001 - the same; one without names is none of an operator
        names = []
    return Presented(tuple(names), begins, ends)


def trusted_certificate(site: TrustedSite, presented: Presented) -> Check:
    """Of one that the site's bundle vouches for."""
    name = OperatorIdentity(SiteName(site.name)).dns_name
    return Check(
        site.name,
        "tls",
        Outcome.OK,
        f"{name} by its authority, until {presented.ends:%Y-%m-%d %H:%M} UTC",
    )


def refused_certificate(
    site: TrustedSite, presented: Presented, now: datetime, why: str
) -> list[Check]:
    """Of one that its bundle does not vouch for; `why` is what the handshake says of it."""
    expected = OperatorIdentity(SiteName(site.name)).dns_name
    if expected not in presented.names:
        shown = ", ".join(presented.names[:3])[:_MOST_WORDS]
        seen = f"a certificate for {printable(shown) or 'no name'}, and not for {expected}"
        advice = NOT_OURS + _NO_ROUTE.format(name=expected)
        if any(fnmatchcase(name, _ANY_OPERATOR) for name in presented.names):
            advice = f"Put right the address of {site.name} in the list, or the site.name there"
        return [_failed(site, seen, advice)]
    if presented.begins > now + _ROUNDING:
        seen = f"its certificate is valid from {presented.begins:%Y-%m-%d %H:%M:%S} UTC only"
        return [_failed(site, seen, _CLOCKS), clock(site, presented, now)]
    if presented.ends < now:
        seen = f"its certificate has run out, on {presented.ends:%Y-%m-%d %H:%M} UTC"
        advice = f"See why the operator of {site.name} does not renew it (its log); {_CLOCKS}"
        return [_failed(site, seen, advice), clock(site, presented, now)]
    seen = f"{expected} by another authority than the one that the list has ({printable(why)})"
    return [_failed(site, seen, _SHOW.format(site=site.name))]


_CLOCKS: Final = "Set the clocks by NTP, there and here"


def clock(site: TrustedSite, presented: Presented, now: datetime) -> Check:
    """How far the site's clock can be from this machine's, as far as a certificate tells.

    An operator has made it before now, and makes the next one when two thirds of its life are
    over, or before: between the two its own clock stands. Of a certificate of some hours that
    says little, and the outcome is then UNKNOWN.
    """
    ahead_at_least, ahead_at_most = presented.made - now, presented.renewed_by - now
    figures = {
        "clock_ahead_at_least_s": ahead_at_least.total_seconds(),
        "clock_ahead_at_most_s": ahead_at_most.total_seconds(),
    }
    if ahead_at_least > _ROUNDING:
        outcome = Outcome.FAIL if ahead_at_least >= BACKDATED else Outcome.WARN
        seen = f"at least {_time(ahead_at_least)} ahead of this machine's: there its certificate "
        seen += "was made at a time that is still to come here"
        return Check(site.name, "clock", outcome, seen, _CLOCKS, figures)
    if ahead_at_most < -_RENEWED_WITHIN:
        late = _time(-ahead_at_most)
        seen = f"at least {late} behind this machine's, or its operator does not renew: by now its "
        seen += "certificate should have been another"
        advice = f"{_CLOCKS}; else see why the operator of {site.name} does not renew (its log)"
        return Check(site.name, "clock", Outcome.WARN, seen, advice, figures)
    told = f"between {_time(-ahead_at_least)} behind and {_time(ahead_at_most)} ahead of this "
    told += "machine's, as far as a certificate tells"
    certain = max(-ahead_at_least, ahead_at_most) < BACKDATED
    advice = (
        ""
        if certain
        else "For a nearer figure have its cluster asked (--contexts), or compare `date -u` at both"
    )
    outcome = Outcome.OK if certain else Outcome.UNKNOWN
    return Check(site.name, "clock", outcome, told, advice, figures)


def _failed(site: TrustedSite, seen: str, advice: str) -> Check:
    return Check(site.name, "tls", Outcome.FAIL, seen, advice)


def _time(span: timedelta) -> str:
    """Hours, minutes and seconds; 0:00 where it is less than nothing."""
    return duration(max(0.0, span.total_seconds()))
