"""How many bytes each link carries in one iteration, from what the receivers saw arrive.

Owns the rate of every link, how far the links overlap, and the budgets. Called by the director,
round by round (one local iteration). Pure; it neither sends nor probes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dlion_api.measurements import LinkDelivery
from dlion_api.names import Rank
from dlion_worker.sidecar.exchange_cost import SHORT_BYTES
from dlion_worker.sidecar.rates import ChangingRate

LEAST_BUDGET_BYTES = 4096
"""Never nothing: what is sent on a link is also how its recovery is seen."""

ASSUMED_ITERATION_S = 1.0
"""Until the first step is timed, so that a probed link has a budget from the start."""

CHANGE_FRACTION = 0.2
LEAST_BUSY_S, LEAST_BUSY_BYTES, MOST_BUSY_S = 0.02, 65536, 3.0

LEAST_CHANGE_S = 0.25
"""A few CFS periods of 0.1 s: a receiver that its quota holds back for one reads late, and all at
once."""

RISES = 3
"""Iterations in which a link carries more, one after the other, until that is believed."""

LEAST_TIMED_BYTES = 16384
"""Of less, on a link that drains, the time says when the receiver was scheduled, not what the link
carries."""

STUCK_S = 1.0
"""Bytes under way for longer than any round trip: the link is full, or dead."""

DEMAND_ROUNDS = 8
HUNGRY_FRACTION = 0.8
"""A link that used less than this of its budget in each of the last rounds has no more to send."""

DEMAND_MARGIN = 1.25
GROWTH_FACTOR = 2.0
LEAST_FREE_FRACTION = 0.25
"""However much the links with little to send take, this part is shared among the others."""

ALIKE_FRACTION = 0.1
"""Links that share an uplink and differ by less than this differ by chance."""

OVERLAP_ROUNDS = 3

SEPARATE_FRACTION = 0.75
"""Links that together carry this much of what each carried alone have nothing to share."""


def _busy_rate() -> ChangingRate:
    return ChangingRate(
        least_s=LEAST_BUSY_S,
        most_s=MOST_BUSY_S,
        change_fraction=CHANGE_FRACTION,
        least_amount=LEAST_BUSY_BYTES,
        least_change_s=LEAST_CHANGE_S,
        rises=RISES,
    )


@dataclass
class _Link:
    """What is known of one link."""

    rate: ChangingRate = field(default_factory=_busy_rate)
    alone_bytes_per_s: float | None = None
    """By the last probe, while the others were idle."""
    carried: bool = False
    """Whether real transfers have been measured, beside the others."""
    offered_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=DEMAND_ROUNDS))
    budget_bytes: int = 0
    unacknowledged_bytes: int = 0
    # this round
    acknowledged_bytes: int = 0
    busy_bytes: int = 0
    busy_s: float = 0.0
    begun_with_bytes: int = 0
    # since all that was under way had last arrived
    old_bytes: int = 0
    old_acknowledged_bytes: int = 0
    old_s: float = 0.0

    def end_round(self, wall_s: float, own_s: float) -> None:
        """Learns from one round, and makes ready for the next."""
        timed = self.busy_bytes >= LEAST_TIMED_BYTES or not self._drained()
        if self.busy_bytes > 0 and timed:
            self.rate.add(self.busy_bytes, self.busy_s)
            self.carried = True
        elif self._drained():
            self._assume(GROWTH_FACTOR * self.acknowledged_bytes / own_s)
        self._look_for_backlog(wall_s)
        under_way_bytes = self.unacknowledged_bytes - self.begun_with_bytes
        self.offered_bytes.append(max(0, self.acknowledged_bytes + under_way_bytes))
        self.acknowledged_bytes, self.busy_bytes, self.busy_s = 0, 0, 0.0
        self.begun_with_bytes = self.unacknowledged_bytes

    def rate_of_round(self) -> float:
        """Bytes per second of this round, as far as it can be told from chance."""
        seen = self.busy_bytes / self.busy_s
        known = self.rate.rate()
        return seen if known is None else min(seen, known)

    def _drained(self) -> bool:
        """Whether the budget was used and all arrived, too little of it at once to be timed."""
        used = self.acknowledged_bytes >= HUNGRY_FRACTION * self.budget_bytes
        return 0 < self.begun_with_bytes <= self.acknowledged_bytes and used

    def _look_for_backlog(self, wall_s: float) -> None:
        """Counts a link as busy all along while old bytes are still under way: the receiver says
        nothing of a link that has stopped."""
        self.old_acknowledged_bytes += self.acknowledged_bytes
        self.old_s += wall_s
        stuck = self.old_acknowledged_bytes < self.old_bytes
        if stuck and self.old_s >= STUCK_S and self.busy_bytes == 0:
            self.rate.add(self.old_acknowledged_bytes, self.old_s)
        if not stuck or self.old_s >= STUCK_S or self.busy_bytes > 0:
            self.old_bytes, self.old_acknowledged_bytes = self.unacknowledged_bytes, 0
            self.old_s = 0.0

    def assume_at_least(self, bytes_per_s: float) -> None:
        """Begins from a rate that was not measured here, where nothing has been."""
        if self.rate.rate() is None:
            self._assume(bytes_per_s)

    def _assume(self, bytes_per_s: float) -> None:
        if bytes_per_s > (self.rate.rate() or 0.0):
            self.rate.clear()
            self.rate.add(bytes_per_s * LEAST_BUSY_S, LEAST_BUSY_S)

    def demand_bytes(self) -> int | None:
        """Most that was offered in one of the last rounds; None where it took what it could."""
        most = max(self.offered_bytes, default=0)
        full = len(self.offered_bytes) == DEMAND_ROUNDS
        return most if full and most < HUNGRY_FRACTION * self.budget_bytes else None


class LinkBudgets:
    """Budgets for all links of one worker.

    A budget is the link's rate x the time of one iteration *without its waits for peers*:
    otherwise sending would slow the iteration, which would raise the budget, and so on. Rates are
    the receivers': bytes that arrived back to back, by the receiver's clock. Links that share an
    uplink are measured while they compete, so each rate is that link's share. Where they did not
    compete all the time the shares add up to too much, and are scaled down by how far the links
    overlapped; a link with less to send than its share leaves the rest to the others.

    Source: policies.md section 1, transmission speed assurance; the division is ours.
    """

    def __init__(self, *, shared_uplink: bool | None, fraction: float = 1.0) -> None:
        """`shared_uplink`: all budgets together keep within what the links carry together. None:
        as measured, by what each link carried alone (probes) and beside the others. `fraction` of
        what a link carries is given out."""
        self._shared_uplink = shared_uplink
        self._fraction = fraction
        self._links: dict[Rank, _Link] = {}
        self._last_rates: dict[Rank, float] = {}
        self._overlap: deque[tuple[float, float]] = deque(maxlen=OVERLAP_ROUNDS)
        self._most_bytes: float | None = None
        self.held_back = False
        """Whether budgets are less than the links carry, by `most_bytes` of the last round."""
        self._pace = ChangingRate(least_s=1e-9, most_s=4.0, change_fraction=CHANGE_FRACTION)

    def set_peers(self, peers: Iterable[Rank]) -> None:
        """Links to those peers exist, and no others; one that comes back begins at its old rate."""
        self._last_rates.update(self.bandwidths())
        self._links = {peer: self._links.get(peer) or _Link() for peer in sorted(set(peers))}
        self.resume(self._last_rates)

    def resume(self, bandwidth_bytes_per_s: Mapping[Rank, float]) -> None:
        """Begins from what an earlier sidecar knew."""
        for peer, rate in bandwidth_bytes_per_s.items():
            if peer in self._links:
                self._links[peer].assume_at_least(rate)
        self._divide()

    def deliver(self, delivery: LinkDelivery) -> None:
        """Takes one report on a link; one on a link that is not ours says nothing any more."""
        link = self._links.get(delivery.peer)
        if link is None:
            return
        link.acknowledged_bytes += delivery.acknowledged_bytes
        link.busy_bytes += delivery.busy_bytes
        link.busy_s += delivery.receiver_busy_s
        link.unacknowledged_bytes = delivery.unacknowledged_bytes

    def probed(self, peer: Rank, busy_bytes: int, receiver_busy_s: float) -> None:
        """Takes the outcome of a probe on a link that had been idle: older knowledge goes."""
        link = self._links.get(peer)
        if link is not None and receiver_busy_s > 0:
            link.alone_bytes_per_s = busy_bytes / receiver_busy_s
            link.carried = False
            link.rate.clear()
            link.rate.add(busy_bytes, receiver_busy_s)
            self._divide()

    def end_round(self, *, wall_s: float, own_s: float, most_bytes: float | None = None) -> None:
        """One local iteration is over: it took `wall_s`, of them `own_s` without waiting. Whatever
        they carry, all links together get at most `most_bytes` for the next, but for short
        messages."""
        own_s = max(own_s, 1e-3)
        self._most_bytes = most_bytes
        self._pace.add(1.0, own_s)
        self._note_overlap()
        for link in self._links.values():
            link.end_round(wall_s, own_s)
        self._divide()

    def budgets(self) -> dict[Rank, int]:
        """Bytes per iteration; a link of which nothing is known yet is not named."""
        return {p: link.budget_bytes for p, link in self._links.items() if link.budget_bytes}

    def bandwidths(self) -> dict[Rank, float]:
        """Bytes per second of each link, as it goes beside the others."""
        rates = {peer: link.rate.rate() for peer, link in self._links.items()}
        return {peer: rate for peer, rate in rates.items() if rate is not None}

    def iteration_s(self) -> float:
        """Time of one iteration without waiting for peers."""
        pace = self._pace.rate()
        return ASSUMED_ITERATION_S if pace is None else 1.0 / pace

    def _note_overlap(self) -> None:
        """What the links carried, and what they would have, had each gone on at its own rate
        for as long as the uplink was busy.

        That is how long the links took, each weighed by its bytes: the longest alone may be that
        of a receiver which takes a few bytes late, and says nothing of the uplink.
        """
        busy = [link for link in self._links.values() if link.busy_bytes and link.busy_s]
        carried_bytes = sum(link.busy_bytes for link in busy)
        if carried_bytes >= LEAST_BUDGET_BYTES:
            busy_s = sum(link.busy_bytes * link.busy_s for link in busy) / carried_bytes
            rates = sum(link.rate_of_round() for link in busy)
            self._overlap.append((carried_bytes, max(carried_bytes, busy_s * rates)))

    def _shared(self) -> bool:
        """As the manifest says, else as measured; shared until there is a measure."""
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
        self.held_back = self._most_bytes is not None and self._spent(wanted) > self._most_bytes
        if self._most_bytes is not None and self.held_back:
            # Not the scaled ones: links that were held back did not compete all the time.
            wanted = self._affordable(share_bytes, self._most_bytes)
        for peer, budget in (_alike(wanted) if self._shared() else wanted).items():
            self._links[peer].budget_bytes = max(LEAST_BUDGET_BYTES, round(budget))

    def _scale(self, share_bytes: Mapping[Rank, float]) -> float:
        """By how much all shares are cut so that they fit together."""
        shared = self._shared()
        limit = self._overlap_fraction(shared=shared) * sum(share_bytes.values())
        spoken_for, wanted = 0.0, 0.0
        for peer, share in share_bytes.items():
            demand = self._demand_bytes(peer) if shared else math.inf
            if math.isinf(demand):
                wanted += share
            else:
                spoken_for += min(share, demand)
        free = max(limit - spoken_for, limit * LEAST_FREE_FRACTION)
        return min(1.0, free / wanted) if wanted > 0 else 1.0

    def _affordable(self, share_bytes: Mapping[Rank, float], most: float) -> dict[Rank, float]:
        """Budgets cut by one factor to `most` in all; short messages stay whole."""
        part = most / self._spent(share_bytes)
        return {
            peer: max(min(share, SHORT_BYTES), min(share, self._demand_bytes(peer)) * part)
            for peer, share in share_bytes.items()
        }

    def _spent(self, budget_bytes: Mapping[Rank, float]) -> float:
        """What all links together can be expected to take of these budgets."""
        return sum(min(each, self._demand_bytes(peer)) for peer, each in budget_bytes.items())

    def _demand_bytes(self, peer: Rank) -> float:
        """The most that its link will take, with a margin; infinite where it takes what it can."""
        demand = self._links[peer].demand_bytes()
        return math.inf if demand is None else DEMAND_MARGIN * demand


def _alike(budget_bytes: Mapping[Rank, float]) -> dict[Rank, float]:
    """The same in sum, with one budget for links that differ by chance only: what goes on them is
    then selected and coded once."""
    groups: list[list[Rank]] = []
    for peer in sorted(budget_bytes, key=lambda peer: (budget_bytes[peer], peer)):
        least = budget_bytes[groups[-1][0]] if groups else 0.0
        if groups and budget_bytes[peer] <= (1 + ALIKE_FRACTION) * least:
            groups[-1].append(peer)
        else:
            groups.append([peer])
    means = [sum(budget_bytes[each] for each in group) / len(group) for group in groups]
    return {peer: mean for group, mean in zip(groups, means, strict=True) for peer in group}
