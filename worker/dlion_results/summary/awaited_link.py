"""The link that a run waits for: its figures, and how to learn or raise them. Pure.

Used by `culprit`. The rate is the sidecar's newest measurement. No process measures latencies, so a
latency is that of the environment, and unknown in a cluster.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from dlion_results.run_folder.environment import COMMAND_FIELD, LATENCY, LocalCommand
from dlion_results.run_folder.stored_values import number_of

BUSY_LINK: Final = 0.6
"""Share of the waiting in which a link that is the reason for it carries bytes at least. While
synchronous workers compute it may rest."""
_BITS: Final = 8 / 1e6
_MAX_LATENCY_MS: Final = 1e6


class LinkKind(StrEnum):
    """What carries the exchange."""

    CLUSTER = "cluster"
    MACHINE = "machine"
    """The memory of this machine: `dlion run` with links that nothing limits."""
    EMULATED = "emulated"
    SIMULATED = "simulated"
    UNLIMITED = "unlimited"
    """Simulated links that nothing limits."""


@dataclass(frozen=True)
class LinkMedium:
    """What carries the exchange of a run, and what limits it there."""

    kind: LinkKind
    remedies: tuple[str, ...] = ("a higher rate", "less latency")
    """What would make links faster in the environment."""

    @property
    def faster(self) -> str:
        """The remedies in a sentence.

        >>> LinkMedium(LinkKind.SIMULATED, ("a higher rate", "less latency", "less loss")).faster
        'a higher rate, less latency or less loss in the environment'
        """
        *others, last = self.remedies
        parts = [*([", ".join(others)] if others else []), last]
        return f"{' or '.join(parts)} in the environment"


CLUSTER_LINKS: Final = LinkMedium(LinkKind.CLUSTER)


@dataclass(frozen=True)
class LinkUse:
    """The link from the peer that was waited for most to the worker that waited most for it."""

    name: str
    used_bytes_per_s: float
    rate_bytes_per_s: float | None
    """The measured rate; None: unknown."""
    latency_ms: float | None = None
    """One way; None: unknown."""

    def explains(self, waiting: float) -> bool:
        """Whether it carries bytes for about as long as workers wait, a share of the time."""
        rate = self.rate_bytes_per_s
        return rate is not None and 0 < BUSY_LINK * waiting * rate <= self.used_bytes_per_s

    @property
    def use(self) -> str:
        """What it carries of its rate.

        >>> LinkUse("a → b", 2_000_000.0, 2_500_000.0, 50.0).use
        '16 of 20 Mbit/s used, latency 50 ms'
        """
        used, rate = self.used_bytes_per_s * _BITS, (self.rate_bytes_per_s or 0.0) * _BITS
        return f"{used:.3g} of {rate:.3g} Mbit/s used{self._latency(', latency ')}"

    @property
    def figures(self) -> str:
        """Its name with what is known of it.

        >>> LinkUse("a → b", 0.0, 2_500_000.0, 50.0).figures, LinkUse("a → b", 0.0, None).figures
        ('a → b (20 Mbit/s, latency 50 ms)', 'a → b (rate unknown)')
        """
        rate = self.rate_bytes_per_s
        known = "rate unknown" if rate is None else f"{rate * _BITS:.3g} Mbit/s"
        return f"{self.name} ({known}{self._latency(', latency ')})"

    def _latency(self, before: str) -> str:
        return "" if self.latency_ms is None else f"{before}{self.latency_ms:.3g} ms"


def late_link_advice(medium: LinkMedium, link: LinkUse | None) -> str:
    """How to find out why messages on that link arrive late.

    >>> late_link_advice(CLUSTER_LINKS, None)
    'measure the links (dlion preflight FILE --contexts A,B --bandwidth)'
    """
    which = "the links" if link is None else f"link {link.name}"
    machine, faster = "see what else runs on this machine", f"give {which} {medium.faster}"
    match medium.kind:
        case LinkKind.CLUSTER:
            return f"measure {which} (dlion preflight FILE --contexts A,B --bandwidth)"
        case LinkKind.MACHINE:
            return f"{machine}, which all workers share"
        case LinkKind.EMULATED:
            return f"{machine}, or {faster}"
        case LinkKind.SIMULATED:
            return faster
        case LinkKind.UNLIMITED:
            return "give the awaited workers more cores in the environment"


def slow_link_advice(medium: LinkMedium, link: LinkUse | None) -> str:
    """How to raise the rate of a link that is busy."""
    which = "the link" if link is None else f"link {link.name}"
    if medium.kind not in (LinkKind.EMULATED, LinkKind.SIMULATED):
        return f"give {which} more bandwidth"
    has_rate = "a higher rate" in medium.remedies
    return f"give {which} {'more bandwidth in the environment' if has_rate else medium.faster}"


def link_medium(environment: Mapping[str, Any] | None) -> LinkMedium:
    """What carries the exchange of a run with that environment in its summary."""
    if environment is None:
        return CLUSTER_LINKS
    command = environment.get(COMMAND_FIELD)
    if command == LocalCommand.REPLAY:  # of recorded rates
        return LinkMedium(LinkKind.SIMULATED)
    is_simulated = command == LocalCommand.SIMULATE
    if remedies := _remedies(environment, has_loss=is_simulated):
        return LinkMedium(LinkKind.SIMULATED if is_simulated else LinkKind.EMULATED, remedies)
    return LinkMedium(LinkKind.UNLIMITED if is_simulated else LinkKind.MACHINE)


_LIMITS: Final[Mapping[tuple[str, ...], tuple[str, ...]]] = {
    ("mbitpers", "latencyms"): ("a higher rate", "less latency"),
    ("losspercent",): ("less packet loss",),
    ("cutworkers", "cutsites", "cutlinks"): ("fewer or shorter cuts",),
}
"""Ends of names of an environment's fields, and what to ask for where one is set."""


def _remedies(environment: Mapping[str, Any], *, has_loss: bool) -> tuple[str, ...]:
    """What would make links faster, by the file's limits: of workers, sites, the radio or a change.

    `has_loss`: whether packets are lost, as in virtual time only. Empty: nothing limits a link.
    """
    document = environment.get("document")
    if not isinstance(document, Mapping):
        return ()
    parts = [document.get(name) for name in ("insideSites", "betweenSites", "radio")]
    for name in ("workers", "changes"):
        parts += _mappings(document.get(name))
    given = {
        str(name).lower() for part in _mappings(parts) for name, value in part.items() if value
    }
    found: list[str] = []
    for ends, remedies in _LIMITS.items():
        if any(name.endswith(ends) for name in given) and (has_loss or ends != ("losspercent",)):
            found += remedies
    return tuple(found)


def link_between(
    sender: Mapping[str, Any], receiver: Mapping[str, Any], environment: Mapping[str, Any] | None
) -> LinkUse | None:
    """The link from one worker of a summary to another; None without its figures."""
    link = next((each for each in sender["links"] if each["peer"] == receiver["rank"]), None)
    span_s = sender.get("wall_s") or 0.0
    if link is None or span_s <= 0:
        return None
    return LinkUse(
        f"{sender['name']} → {receiver['name']}",
        link["acknowledged_bytes"] / span_s,
        link["last_bandwidth_bytes_per_s"],
        _latency_ms(environment or {}, sender, receiver),
    )


def _latency_ms(
    environment: Mapping[str, Any], sender: Mapping[str, Any], receiver: Mapping[str, Any]
) -> float | None:
    """The latency of the recorded figures, or else of the environment file; None if it changes."""
    for figure in _mappings(environment.get("figures")):
        ends = figure.get("rank"), figure.get("peer")
        if figure.get("quantity") == LATENCY and ends == (sender["rank"], receiver["rank"]):
            return _milliseconds(figure.get("measured"))
    document = environment.get("document")
    if not isinstance(document, Mapping):
        return None
    place = "insideSites" if sender.get("site") == receiver.get("site") else "betweenSites"
    changes = _mappings(document.get("changes"))
    traffic = document.get(place)
    if not isinstance(traffic, Mapping) or any(f"{place}LatencyMs" in each for each in changes):
        return None
    return _milliseconds(traffic.get("latencyMs"))


def _milliseconds(stored: object) -> float | None:
    value = number_of(stored, below=_MAX_LATENCY_MS)
    return value if value is not None and value > 0 else None


def _mappings(stored: object) -> Sequence[Mapping[str, Any]]:
    items = stored if isinstance(stored, list | tuple) else ()
    return [each for each in items if isinstance(each, Mapping)]
