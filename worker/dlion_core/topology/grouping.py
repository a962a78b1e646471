"""The current grouping of workers, and the measured rates between all pairs of them. Pure.

Used under `exchange.topology: clustered`. With `exchange.grouping: learned` groups are made of
predicted rates (`link_forecast`) in place of the measured ones. Rates come from probes only: every
pair is then measured in the same way, linked or not, and current traffic does not influence the
next grouping.

Agreement: every sidecar sends its worker's rates and its current grouping. Of two groupings the
larger one counts (`Grouping`), so that sidecars with the same information agree. The lowest present
rank decides. If two workers consider themselves the lowest, as after a partition, both send theirs
and one remains. Meanwhile a pair is linked only if both sides want the link.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.protocol.measurements import Grouping
from dlion_api.spec import Job
from dlion_core.topology.clusters import (
    MAX_VERSION,
    graph_of_groups,
    grouping_problem,
    groups_by_site,
    pairs_of,
)
from dlion_core.topology.forecast_model import shipped_model
from dlion_core.topology.link_forecast import LinkForecast
from dlion_core.topology.regrouping import Regrouping

MIN_PROBES: Final = 3
"""Probes needed before a link's rate is known."""

MAX_PROBES: Final = 5
"""Probes kept per link. The rate is what all but one of them reached: fast *and* stable."""

MAX_MEASURABLE_BYTES_PER_S: Final = 50e6
"""A probe's 128 KiB in 2.6 ms. Above this, scheduling of the receiver dominates the result."""

PAIR_PROBE_S: Final = 5.0
"""Interval of probes of known links: the cost per worker does not depend on their number."""

PAIR_RETRY_S: Final = 2.0
"""Interval of probes of one link whose rate is not known yet."""

MAX_MISSED_PROBES: Final = 20
"""Probes of known links that are made up for at most."""

LEARNED_PROBE_S: Final = 1.0
"""`PAIR_PROBE_S` of learned groups: about 1 Mbit/s for each worker, whatever their number."""

FAST_PROBES: Final = 4.0
"""Learned groups probe the fastest quarter of a worker's links so many times as often."""


class PairBandwidths:
    """Probed rates of one worker's links, and the rates that peers report.

    For learned groups (`is_learned`) a rate is that of the last probe, so that changes count at
    once, and fast links are probed more often than others.
    """

    def __init__(self, rank: Rank, *, is_learned: bool = False) -> None:
        self._rank, self._is_learned = rank, is_learned
        self._kept, self._needed = (1, 1) if is_learned else (MAX_PROBES, MIN_PROBES)
        self._probe_s = LEARNED_PROBE_S if is_learned else PAIR_PROBE_S
        self._probes: dict[Rank, deque[float]] = {}
        self._peer_rates: dict[Rank, Mapping[Rank, float]] = {}
        self._probed_at_s: dict[Rank, float] = {}
        self._known_probed_at_s: float | None = None
        """When the last probe of a known link was due."""

    def probed(self, peer: Rank, bytes_per_s: float) -> None:
        if bytes_per_s > 0:
            measured = min(bytes_per_s, MAX_MEASURABLE_BYTES_PER_S)
            self._probes.setdefault(peer, deque(maxlen=self._kept)).append(measured)

    def add_peer_rates(self, rank: Rank, bytes_per_s: Mapping[Rank, float]) -> None:
        """Set the rates of a peer's links, as its sidecar reports them."""
        if bytes_per_s:
            self._peer_rates[rank] = bytes_per_s

    def own(self) -> dict[Rank, float]:
        """Rates of this worker's links with enough probes: the middle of three, the second lowest
        of five."""
        return {
            peer: sorted(probes)[len(probes) // 3]
            for peer, probes in sorted(self._probes.items())
            if len(probes) >= self._needed
        }

    def for_ranks(self, ranks: Iterable[Rank]) -> dict[tuple[Rank, Rank], float]:
        """For each known pair (lower rank first), the rate of the slower direction."""
        reported = {**self._peer_rates, self._rank: self.own()}
        slower = {}
        for one, other in pairs_of(ranks):
            ways = (reported.get(one, {}).get(other), reported.get(other, {}).get(one))
            known = [rate for rate in ways if rate is not None]
            if known:
                slower[one, other] = min(known)
        return slower

    def directed(self, ranks: Collection[Rank]) -> dict[tuple[Rank, Rank], float]:
        """The reported rates between those workers, by sender and receiver."""
        reported = {**self._peer_rates, self._rank: self.own()}
        return {
            (rank, peer): rate
            for rank in ranks
            for peer, rate in reported.get(rank, {}).items()
            if peer in ranks
        }

    def next_to_probe(self, peers: Iterable[Rank], now_s: float) -> Rank | None:
        """The link to probe now: the one probed least recently. Calling this counts as a probe.
        Known links have their turn even if some others can never be measured."""
        probed_at_s = {peer: self._probed_at_s.get(peer, float("-inf")) for peer in sorted(peers)}
        unknown = {
            p: at for p, at in probed_at_s.items() if len(self._probes.get(p, ())) < self._needed
        }
        known = [peer for peer in probed_at_s if peer not in unknown]
        if known and self._known_probed_at_s is None:
            self._known_probed_at_s = now_s
        if self._known_probed_at_s is not None and now_s - self._known_probed_at_s >= self._probe_s:
            due = known
            # In virtual time it is asked once a step, and then makes up for the time in between.
            next_s = self._known_probed_at_s + self._probe_s
            self._known_probed_at_s = max(next_s, now_s - MAX_MISSED_PROBES * self._probe_s)
        else:
            due = [peer for peer, at in unknown.items() if now_s - at >= PAIR_RETRY_S]
        if not due:
            return None
        peer = min(due, key=lambda peer: (probed_at_s[peer], peer))
        if self._is_learned and due is known:
            peer = self._longest_awaited(known, now_s)
        self._probed_at_s[peer] = now_s
        return peer

    def _longest_awaited(self, known: list[Rank], now_s: float) -> Rank:
        """The link that was not probed for longest, where fast ones count `FAST_PROBES` times."""
        by_rate = sorted(known, key=lambda peer: (-self._probes[peer][-1], peer))
        fast = frozenset(by_rate[: -(-len(by_rate) // 4)])

        def waited_s(peer: Rank) -> float:
            waited = now_s - self._probed_at_s.get(peer, float("-inf"))
            return waited * FAST_PROBES if peer in fast else waited

        return max(known, key=lambda peer: (waited_s(peer), -peer))


class GroupingState:
    """One sidecar's part in the grouping."""

    def __init__(self, job: Job, rank: Rank) -> None:
        self._rank = rank
        self._ranks = frozenset(worker.rank for worker in job.workers())
        is_learned = job.spec.exchange.grouping == "learned"
        self.rates = PairBandwidths(rank, is_learned=is_learned)
        self._forecast = LinkForecast(shipped_model()) if is_learned else None
        self.held: Grouping = groups_by_site({worker.rank: worker.site for worker in job.workers()})
        self._regrouping = Regrouping(rank)

    @property
    def neighbours(self) -> frozenset[Rank]:
        """The workers that this worker exchanges with now."""
        return graph_of_groups(self.held)[self._rank]

    def take(self, grouping: Grouping) -> bool:
        """Adopt a received grouping if it is larger; return whether it changed.

        Raises: ContractError if it is not a valid grouping of this job's workers.
        """
        if problem := grouping_problem(grouping, self._ranks):
            raise ContractError(f"grouping {grouping.version} of {grouping.decider}: {problem}")
        if grouping <= self.held:
            return False
        self.held = grouping
        return True

    def regroup(self, present: Collection[Rank], now_s: float) -> bool:
        """Regroup if this worker decides and it is useful; return whether the grouping changed."""
        if min(present, default=None) != self._rank:
            return False
        rates = self.rates.for_ranks(present)
        if self._forecast is not None and self._regrouping.is_due(now_s):
            reported = self.rates.directed(frozenset(present))
            rates = self._forecast.rates(present, reported, now_s)
        slower = self._regrouping.check(present, rates, self.held, now_s)
        return slower is not None and slower.version <= MAX_VERSION and self.take(slower)
