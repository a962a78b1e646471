"""Bytes that each link may carry per iteration, from what receivers measured.

The controller calls it in rounds of one local iteration. Pure: it neither sends nor probes.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dlion_api.names import Rank
from dlion_api.protocol.measurements import LinkDelivery
from dlion_core.resource_control.exchange_cost import SHORT_BYTES
from dlion_core.resource_control.rates import ChangingRate

PROBE_BYTES = 128 * 1024
"""Payload of a probe of an idle link: a tenth of a second at 10 Mbit/s."""

MIN_BUDGET_BYTES = 256
"""Never zero: only traffic shows that a link has recovered."""

ASSUMED_ITERATION_S = 1.0
"""Until the first step is timed, so that a probed link has a budget from the start."""

CHANGE_FRACTION = 0.2
MIN_BUSY_S, MIN_BUSY_BYTES, MAX_BUSY_S = 0.02, 65536, 3.0

MIN_CHANGE_S = 0.25
"""A few CFS periods of 0.1 s: a receiver throttled for one period reads late, and all at once."""

MIN_RISE_COUNT = 3
"""A higher rate counts after this many consecutive iterations."""

MIN_TIMED_BYTES = 16384
"""Minimum bytes of a measurement: with fewer on a draining link, the time is that of the receiver's
scheduling."""

RECEIVER_DELAY_S = 0.05
"""How late a busy receiver reads. Transfers that should take less time are judged together."""

SHORT_COUNT = 8
"""If this many short transfers in a row, but for the fastest one, are slow, the link is. If all but
the two slowest are fast, it has become faster: receivers that read late, and then all at once, make
single transfers look fast."""

STUCK_S = 1.0
"""Longer than any round trip: a link with bytes in flight for this long is full or dead."""

DEMAND_ROUNDS = 8
FULL_USE_FRACTION = 0.8
"""A link that used less than this in each of the last rounds has no more to send."""

DEMAND_MARGIN = 1.25
GROWTH_FACTOR = 2.0
MIN_FREE_FRACTION = 0.25
"""Share of the uplink reserved for links with more to send."""

SIMILAR_FRACTION = 0.1
"""Links on a shared uplink whose budgets differ by less than this differ by noise only."""

OVERLAP_ROUNDS = 3

SEPARATE_FRACTION = 0.75
"""If links together reach this part of their separate rates, they share no bottleneck."""


def _busy_rate() -> ChangingRate:
    return ChangingRate(
        min_s=MIN_BUSY_S,
        max_s=MAX_BUSY_S,
        change_fraction=CHANGE_FRACTION,
        min_amount=MIN_BUSY_BYTES,
        min_change_s=MIN_CHANGE_S,
        min_rise_count=MIN_RISE_COUNT,
    )


@dataclass
class _LinkEstimate:
    receiver_delay_s: float
    rate: ChangingRate = field(default_factory=_busy_rate)
    alone_bytes_per_s: float | None = None
    """Rate of the last probe, while the other links were idle."""
    carried: bool = False
    """Whether real transfers have been measured, beside those of other links."""
    short_bytes_per_s: deque[float] = field(default_factory=lambda: deque(maxlen=SHORT_COUNT))
    """Rates of the latest short transfers."""
    offered_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=DEMAND_ROUNDS))
    budget_bytes: int = 0
    unacknowledged_bytes: int = 0
    # this round
    acknowledged_bytes: int = 0
    busy_bytes: int = 0
    busy_s: float = 0.0
    initial_unacknowledged_bytes: int = 0
    # since everything in flight had last arrived
    old_bytes: int = 0
    old_acknowledged_bytes: int = 0
    old_s: float = 0.0

    def end_round(self, wall_s: float, own_s: float) -> None:
        """Update the estimate from one round and start the next."""
        if self.busy_bytes > 0 and self._is_timed():
            self.rate.add(self.busy_bytes, self.busy_s)
            self.carried = True
            self.short_bytes_per_s.clear()
        elif self._drained() and self.busy_bytes < MIN_TIMED_BYTES:
            # A message of several iterations may exceed the budget of one: no sign of a fast link.
            carried_bytes = min(self.acknowledged_bytes, self.budget_bytes or math.inf)
            self._assume(GROWTH_FACTOR * carried_bytes / own_s)
        elif self.busy_bytes > 0 and self.busy_s > 0:
            self._add_short(self.busy_bytes / self.busy_s)
        self._detect_backlog(wall_s)
        in_flight_bytes = self.unacknowledged_bytes - self.initial_unacknowledged_bytes
        self.offered_bytes.append(max(0, self.acknowledged_bytes + in_flight_bytes))
        self.acknowledged_bytes, self.busy_bytes, self.busy_s = 0, 0, 0.0
        self.initial_unacknowledged_bytes = self.unacknowledged_bytes

    def rate_of_round(self) -> float:
        """Bytes per second of this round, limited by the known rate as protection against noise."""
        measured = self.busy_bytes / self.busy_s
        known = self.rate.rate()
        return measured if known is None else min(measured, known)

    def _is_timed(self) -> bool:
        """Whether the time of this round's bytes is the link's, and not the receiver's delay."""
        if self.busy_bytes < MIN_TIMED_BYTES and self._drained():
            return False
        is_long = self.busy_bytes >= self.receiver_delay_s * (self.rate.rate() or 0.0)
        has_backlog = self.acknowledged_bytes < self.initial_unacknowledged_bytes
        return is_long or (has_backlog and self.busy_s >= MIN_CHANGE_S)

    def _add_short(self, bytes_per_s: float) -> None:
        """Change the rate if enough short transfers agree."""
        self.short_bytes_per_s.append(bytes_per_s)
        if len(self.short_bytes_per_s) < SHORT_COUNT:
            return
        known, ordered = self.rate.rate() or 0.0, sorted(self.short_bytes_per_s)
        if ordered[-2] < (1 - CHANGE_FRACTION) * known:
            self._replace(ordered[-2])
        elif ordered[2] > (1 + CHANGE_FRACTION) * known:
            self._replace(ordered[2])

    def _drained(self) -> bool:
        """Whether the budget was used and everything arrived, too little of it back to back to be
        timed."""
        used = self.acknowledged_bytes >= FULL_USE_FRACTION * self.budget_bytes
        return 0 < self.initial_unacknowledged_bytes <= self.acknowledged_bytes and used

    def _detect_backlog(self, wall_s: float) -> None:
        """Count a link as busy while old bytes are in flight: a receiver reports nothing of a
        stalled link."""
        self.old_acknowledged_bytes += self.acknowledged_bytes
        self.old_s += wall_s
        stuck = self.old_acknowledged_bytes < self.old_bytes
        if stuck and self.old_s >= STUCK_S and self.busy_bytes == 0:
            self.rate.add(self.old_acknowledged_bytes, self.old_s)
        if not stuck or self.old_s >= STUCK_S or self.busy_bytes > 0:
            self.old_bytes, self.old_acknowledged_bytes = self.unacknowledged_bytes, 0
            self.old_s = 0.0

    def assume_at_least(self, bytes_per_s: float) -> None:
        """Start from a rate measured elsewhere, if there is no own measurement."""
        if self.rate.rate() is None:
            self._assume(bytes_per_s)

    def _assume(self, bytes_per_s: float) -> None:
        if bytes_per_s > (self.rate.rate() or 0.0):
            self._replace(bytes_per_s)

    def _replace(self, bytes_per_s: float) -> None:
        self.rate.clear()
        self.rate.add(bytes_per_s * MIN_BUSY_S, MIN_BUSY_S)
        self.short_bytes_per_s.clear()

    def demand_bytes(self) -> int | None:
        """The most offered in one of the last rounds; None if the link used its whole budget."""
        most = max(self.offered_bytes, default=0)
        full = len(self.offered_bytes) == DEMAND_ROUNDS
        return most if full and most < FULL_USE_FRACTION * self.budget_bytes else None


class LinkBudgets:
    """Budgets for all links of one worker.

    A budget is the link's rate x the time of one iteration *without its waits for peers*: otherwise
    sending would slow the iteration, and so raise the budget. Receivers measure the rates, over
    bytes that arrived back to back.

    Links that share an uplink are measured while they compete, so each rate is that link's share.
    If they competed only part of the time, the shares add up to too much and are scaled down by the
    overlap. A link with less to send leaves the rest to the others.

    Source: DLion, transmission speed assurance; the division is ours.
    """

    def __init__(
        self,
        *,
        shared_uplink: bool | None,
        fraction: float = 1.0,
        receiver_delay_s: float = RECEIVER_DELAY_S,
    ) -> None:
        """`shared_uplink`: whether all budgets together are limited to the uplink.

        None decides by measurement: each link alone (probes) and all together. `fraction` is the
        part of each rate to use. `receiver_delay_s`: how late a receiver may read.
        """
        self._receiver_delay_s = receiver_delay_s
        self._shared_uplink = shared_uplink
        self._fraction = fraction
        self._links: dict[Rank, _LinkEstimate] = {}
        self._last_rates: dict[Rank, float] = {}
        self._overlap: deque[tuple[float, float]] = deque(maxlen=OVERLAP_ROUNDS)
        self._max_bytes: float | None = None
        self.is_limited = False
        """Whether `max_bytes` of the last round limits budgets to less than the links carry."""
        self._pace = ChangingRate(min_s=1e-9, max_s=4.0, change_fraction=CHANGE_FRACTION)

    def set_peers(self, peers: Iterable[Rank]) -> None:
        """Set the peers with links; one that returns starts at its old rate."""
        self._last_rates.update(self.bandwidths())
        self._links = {
            peer: self._links.get(peer) or _LinkEstimate(self._receiver_delay_s)
            for peer in sorted(set(peers))
        }
        self.resume(self._last_rates)

    def resume(self, bandwidth_bytes_per_s: Mapping[Rank, float]) -> None:
        """Start from the rates of an earlier sidecar."""
        for peer, rate in bandwidth_bytes_per_s.items():
            if peer in self._links:
                self._links[peer].assume_at_least(rate)
        self._divide()

    def deliver(self, delivery: LinkDelivery) -> None:
        """Add one report on a link; ignore reports on former links."""
        link = self._links.get(delivery.peer)
        if link is None:
            return
        link.acknowledged_bytes += delivery.acknowledged_bytes
        link.busy_bytes += delivery.busy_bytes
        link.busy_s += delivery.receiver_busy_s
        link.unacknowledged_bytes = delivery.unacknowledged_bytes

    def probed(self, peer: Rank, busy_bytes: int, receiver_busy_s: float) -> None:
        """Add the result of a probe on an idle link; it replaces earlier measurements."""
        link = self._links.get(peer)
        if link is not None and receiver_busy_s > 0:
            link.alone_bytes_per_s = busy_bytes / receiver_busy_s
            link.carried = False
            link.rate.clear()
            link.rate.add(busy_bytes, receiver_busy_s)
            link.short_bytes_per_s.clear()
            self._divide()

    def end_round(self, *, wall_s: float, own_s: float, max_bytes: float | None = None) -> None:
        """Finish one local iteration of `wall_s`, of which `own_s` was not waiting. `max_bytes`
        limits all links together in the next iteration, except for short messages."""
        own_s = max(own_s, 1e-3)
        self._max_bytes = max_bytes
        self._pace.add(1.0, own_s)
        self._record_overlap()
        for link in self._links.values():
            link.end_round(wall_s, own_s)
        self._divide()

    def budgets(self) -> dict[Rank, int]:
        """Bytes per iteration, for links with a known rate."""
        return {p: link.budget_bytes for p, link in self._links.items() if link.budget_bytes}

    def bandwidths(self) -> dict[Rank, float]:
        """Bytes per second of each link while the others are in use."""
        rates = {peer: link.rate.rate() for peer, link in self._links.items()}
        return {peer: rate for peer, rate in rates.items() if rate is not None}

    def iteration_s(self) -> float:
        """Time of one iteration without waiting for peers."""
        pace = self._pace.rate()
        return ASSUMED_ITERATION_S if pace is None else 1.0 / pace

    def _record_overlap(self) -> None:
        """Record what the links carried, and what they would have carried without pauses.

        The busy time of the uplink is the mean over links, weighted by bytes. The maximum would not
        do: it may belong to a receiver that reads a few bytes late.
        """
        busy = [link for link in self._links.values() if link.busy_bytes and link.busy_s]
        carried_bytes = sum(link.busy_bytes for link in busy)
        if carried_bytes >= MIN_BUDGET_BYTES:
            busy_s = sum(link.busy_bytes * link.busy_s for link in busy) / carried_bytes
            rates = sum(link.rate_of_round() for link in busy)
            self._overlap.append((carried_bytes, max(carried_bytes, busy_s * rates)))

    def _shared(self) -> bool:
        """According to the manifest, else as measured; shared until measured."""
        if self._shared_uplink is not None:
            return self._shared_uplink
        alone, together = 0.0, 0.0
        for link in self._links.values():
            rate = link.rate.rate()
            if link.carried and link.alone_bytes_per_s is not None and rate is not None:
                alone, together = alone + link.alone_bytes_per_s, together + rate
        return alone == 0.0 or together < SEPARATE_FRACTION * alone

    def _overlap_fraction(self, *, shared: bool) -> float:
        if not shared:
            return 1.0
        if not self._overlap:  # probes only, which had the uplink to themselves
            return 1.0 / max(1, len(self._links))
        return sum(carried for carried, _ in self._overlap) / sum(all_ for _, all_ in self._overlap)

    def _divide(self) -> None:
        budgeted_s = self._fraction * self.iteration_s()
        share_bytes = {peer: rate * budgeted_s for peer, rate in self.bandwidths().items()}
        scale = self._scale(share_bytes)
        wanted = {peer: share * scale for peer, share in share_bytes.items()}
        self.is_limited = (
            self._max_bytes is not None and self._expected_bytes(wanted) > self._max_bytes
        )
        if self._max_bytes is not None and self.is_limited:
            # Use unscaled shares: links limited by CPU did not compete all the time.
            wanted = self._limited_to(share_bytes, self._max_bytes)
        for peer, budget in (_average_similar(wanted) if self._shared() else wanted).items():
            self._links[peer].budget_bytes = max(MIN_BUDGET_BYTES, round(budget))

    def _scale(self, share_bytes: Mapping[Rank, float]) -> float:
        """The factor that makes all shares fit together."""
        shared = self._shared()
        limit = self._overlap_fraction(shared=shared) * sum(share_bytes.values())
        demanded, wanted = 0.0, 0.0
        for peer, share in share_bytes.items():
            demand = self._demand_bytes(peer) if shared else math.inf
            if math.isinf(demand):
                wanted += share
            else:
                demanded += min(share, demand)
        free = max(limit - demanded, limit * MIN_FREE_FRACTION)
        return min(1.0, free / wanted) if wanted > 0 else 1.0

    def _limited_to(self, share_bytes: Mapping[Rank, float], most: float) -> dict[Rank, float]:
        """Reduce budgets by one factor to `most` in all; short messages stay whole."""
        part = most / self._expected_bytes(share_bytes)
        return {
            peer: max(min(share, SHORT_BYTES), min(share, self._demand_bytes(peer)) * part)
            for peer, share in share_bytes.items()
        }

    def _expected_bytes(self, budget_bytes: Mapping[Rank, float]) -> float:
        """The bytes that all links together are expected to use of these budgets."""
        return sum(min(each, self._demand_bytes(peer)) for peer, each in budget_bytes.items())

    def _demand_bytes(self, peer: Rank) -> float:
        """The most that the link will use, with a margin; infinite if it uses its whole budget."""
        demand = self._links[peer].demand_bytes()
        return math.inf if demand is None else DEMAND_MARGIN * demand


def _average_similar(budget_bytes: Mapping[Rank, float]) -> dict[Rank, float]:
    """Replace budgets that differ by noise only with their mean; the sum stays. What these links
    carry is then selected and coded once."""
    groups: list[list[Rank]] = []
    for peer in sorted(budget_bytes, key=lambda peer: (budget_bytes[peer], peer)):
        least = budget_bytes[groups[-1][0]] if groups else 0.0
        if groups and budget_bytes[peer] <= (1 + SIMILAR_FRACTION) * least:
            groups[-1].append(peer)
        else:
            groups.append([peer])
    means = [sum(budget_bytes[each] for each in group) / len(group) for group in groups]
    return {peer: mean for group, mean in zip(groups, means, strict=True) for peer in group}
