"""Which grouping of the workers one sidecar holds, and what it knows of all links.

Owns rates between all pairs of workers, by probes alone: every pair is then measured by the same
means, linked or not, and what training sends now does not decide who is linked next. Called by the
director under `exchange.topology: clustered`. Pure; it neither probes nor tells.

How all come to agree: every sidecar tells every other what its worker's links carry and which
grouping it holds, with its capacity. Of two groupings the larger counts (`Grouping`), so that all
who have heard the same ones hold the same one. One worker decides, the lowest rank that is there;
where two think so for a while, as after a cut, both tell, and one of the two remains. Meanwhile
only those pairs are linked of which both hold that they should be: a link has two ends.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from dlion_api.errors import ContractError
from dlion_worker.policies.clusters import (
    MOST_VERSION,
    by_sites,
    graph_of_groups,
    pairs_of,
    problem_of,
)
from dlion_worker.policies.regrouping import Regrouping

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from dlion_api.measurements import Grouping
    from dlion_api.names import Rank
    from dlion_api.spec import Job

FIRST_PROBES: Final = 3
"""So many before anything is known of a link."""

PROBES_KEPT: Final = 5
"""Of each link. It counts as what all but one of them saw: fast *and* stable."""

TELLABLE_BYTES_PER_S: Final = 50e6
"""A probe's 128 KiB in 2.6 ms: what it says of faster links is when the receiver was scheduled."""

PAIR_PROBE_S: Final = 5.0
"""From one probe of a known link to the next one of another: a worker's probes cost the same
however many others there are."""

PAIR_RETRY_S: Final = 2.0
"""From one probe of a link that is not known yet to the next."""


class PairRates:
    """Bytes per second between workers."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._probes: dict[Rank, deque[float]] = {}
        self._told: dict[Rank, Mapping[Rank, float]] = {}
        self._asked_s: dict[Rank, float] = {}
        self._known_s: float | None = None
        """When a known link was last probed."""

    def probed(self, peer: Rank, bytes_per_s: float) -> None:
        """Takes the outcome of a probe."""
        if bytes_per_s > 0:
            seen = min(bytes_per_s, TELLABLE_BYTES_PER_S)
            self._probes.setdefault(peer, deque(maxlen=PROBES_KEPT)).append(seen)

    def told(self, rank: Rank, bytes_per_s: Mapping[Rank, float]) -> None:
        """Takes what another sidecar says of its worker's links."""
        if bytes_per_s:
            self._told[rank] = bytes_per_s

    def own(self) -> dict[Rank, float]:
        """What this worker's links carry, where enough probes say so: of three the one in the
        middle, of five the second from below."""
        return {
            peer: sorted(probes)[len(probes) // 3]
            for peer, probes in sorted(self._probes.items())
            if len(probes) >= FIRST_PROBES
        }

    def among(self, ranks: Iterable[Rank]) -> dict[tuple[Rank, Rank], float]:
        """Of the pairs that are known, the slower direction, by their lower and higher rank."""
        told = {**self._told, self._rank: self.own()}
        found = {}
        for one, other in pairs_of(ranks):
            ways = (told.get(one, {}).get(other), told.get(other, {}).get(one))
            known = [rate for rate in ways if rate is not None]
            if known:
                found[one, other] = min(known)
        return found

    def next_to_probe(self, peers: Iterable[Rank], now_s: float) -> Rank | None:
        """The link that was asked for least recently; asking counts. Known ones have their turn
        whatever there is of which nothing can be found out."""
        asked = {peer: self._asked_s.get(peer, float("-inf")) for peer in sorted(peers)}
        unknown = {p: at for p, at in asked.items() if len(self._probes.get(p, ())) < FIRST_PROBES}
        known = [peer for peer in asked if peer not in unknown]
        if known and self._known_s is None:
            self._known_s = now_s
        if self._known_s is not None and now_s - self._known_s >= PAIR_PROBE_S:
            due, self._known_s = known, now_s
        else:
            due = [peer for peer, at in unknown.items() if now_s - at >= PAIR_RETRY_S]
        if not due:
            return None
        peer = min(due, key=lambda peer: (asked[peer], peer))
        self._asked_s[peer] = now_s
        return peer


class Groups:
    """One sidecar's part in deciding who is linked with whom."""

    def __init__(self, job: Job, rank: Rank) -> None:
        self._rank = rank
        self._ranks = frozenset(worker.rank for worker in job.workers())
        self.rates = PairRates(rank)
        self.held: Grouping = by_sites({worker.rank: worker.site for worker in job.workers()})
        self._regrouping = Regrouping(rank)

    @property
    def neighbours(self) -> frozenset[Rank]:
        """With whom this worker exchanges now."""
        return graph_of_groups(self.held)[self._rank]

    def take(self, grouping: Grouping) -> bool:
        """Takes what was told; whether it is held now, and was not.

        Raises: ContractError where it is no grouping of this job's workers.
        """
        if problem := problem_of(grouping, self._ranks):
            raise ContractError(f"grouping {grouping.version} of {grouping.decider}: {problem}")
        if grouping <= self.held:
            return False
        self.held = grouping
        return True

    def look(self, present: Collection[Rank], now_s: float) -> bool:
        """Decides, where that is this worker's part, given who is there; whether another grouping
        is held now."""
        if min(present, default=None) != self._rank:
            return False
        found = self._regrouping.look(present, self.rates.among(present), self.held, now_s)
        return found is not None and found.version <= MOST_VERSION and self.take(found)
