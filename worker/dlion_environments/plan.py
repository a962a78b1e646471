"""An environment applied to a job's workers: quotas, rates, latencies, changes.

The local runner emulates it with real processes; the simulator applies it in virtual time. Contains
values only.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from dlion_api.names import Rank, WorkerIdentity

MESSAGE_OVERHEAD_BYTES = 128
"""Bytes of a message besides its payload: its frame's fields, HTTP/2 and a TLS record."""
BYTES_PER_MBIT = 125_000

SEGMENT_BYTES = 1448
"""Payload of a full TCP segment on Ethernet, with time stamps."""

MATHIS_CONSTANT = math.sqrt(3 / 4)
"""With an acknowledgement for every second segment, the usual delayed one (for every one: 3/2)."""

MIN_ROUND_TRIP_S = 0.001
"""Round trip of a link without latency. Source: this project."""


def tcp_bytes_per_s(loss_fraction: float, round_trip_s: float) -> float:
    """Maximum payload bytes per second; inf without loss.

    A window that halves at each loss and grows by a segment per round trip carries MSS / RTT x C /
    sqrt(p). CUBIC does no worse: at short round trips it follows the same law (RFC 9438, section
    4.3). Time-outs are ignored; above some per cent of loss they reduce the rate further.

    Source: Mathis, Semke, Mahdavi and Ott, The Macroscopic Behavior of the TCP Congestion Avoidance
    Algorithm, ACM Computer Communication Review 27(3), 1997.
    """
    if loss_fraction <= 0:
        return math.inf
    round_trip_s = max(MIN_ROUND_TRIP_S, round_trip_s)
    return SEGMENT_BYTES / round_trip_s * MATHIS_CONSTANT / math.sqrt(loss_fraction)


def combined_fraction(percents: Iterable[float]) -> float:
    """Total loss of a path whose segments lose packets independently.

    >>> round(combined_fraction([10.0, 50.0]), 6)
    0.55
    """
    return 1.0 - math.prod(1.0 - percent / 100 for percent in percents)


@dataclass(frozen=True)
class Pipe:
    """A rate shared by all traffic between a worker, or a site, and `peers` in one direction.

    A frame passes *every* pipe it belongs to: those of the sender's uplink that name the receiver,
    and those of the receiver's downlink that name the sender.
    """

    peers: frozenset[Rank]
    bytes_per_s: float
    sharers: frozenset[Rank] = frozenset()
    """All workers that share it, and have it among their own pipes; empty: it belongs to one."""


PipeKey = tuple[object, ...]
"""Identifies a pipe among all pipes of a run, while their shape stays."""


@dataclass(frozen=True)
class WorkerConditions:
    """One worker's conditions at one time. Without quota or pipes it is not limited."""

    rank: Rank
    quota_cores: float | None = None
    uplink: tuple[Pipe, ...] = ()
    downlink: tuple[Pipe, ...] = ()
    latency_s: Mapping[Rank, float] = field(default_factory=dict)
    """One-way latency to each peer that has any."""
    cut_peers: frozenset[Rank] = frozenset()
    """Peers to and from which all packets are dropped silently."""
    loss_fraction: Mapping[Rank, float] = field(default_factory=dict)
    """Fraction of packets lost, for each peer with loss."""


@dataclass(frozen=True)
class Conditions:
    """All workers' conditions at one time, by rank."""

    workers: tuple[WorkerConditions, ...]

    def worker(self, rank: Rank) -> WorkerConditions:
        """The conditions of that rank."""
        return self.workers[rank]

    def pipes(self, sender: Rank, receiver: Rank) -> Iterator[tuple[PipeKey, Pipe]]:
        """Every pipe of one link; links that share a pipe have it with an equal key."""
        for is_uplink, rank, peer in ((True, sender, receiver), (False, receiver, sender)):
            worker = self.workers[rank]
            for index, pipe in enumerate(worker.uplink if is_uplink else worker.downlink):
                if peer in pipe.peers:
                    yield (is_uplink, pipe.peers, pipe.sharers or (rank, index)), pipe

    def link_bytes_per_s(self, sender: Rank, receiver: Rank) -> float:
        """Maximum rate of one link while all others are idle; inf if unlimited, 0 if cut."""
        if receiver in self.workers[sender].cut_peers:
            return 0.0
        pipes = self.pipes(sender, receiver)
        shaped = min((pipe.bytes_per_s for _, pipe in pipes), default=float("inf"))
        return min(shaped, self.loss_bytes_per_s(sender, receiver))

    def loss_bytes_per_s(self, sender: Rank, receiver: Rank) -> float:
        """Maximum payload rate of one link under its packet loss; inf without loss."""
        there, back = self.workers[sender], self.workers[receiver]
        round_trip_s = there.latency_s.get(receiver, 0.0) + back.latency_s.get(sender, 0.0)
        return tcp_bytes_per_s(there.loss_fraction.get(receiver, 0.0), round_trip_s)


@dataclass(frozen=True)
class ConditionsChange:
    """The complete conditions from `time_s` after the start on."""

    time_s: float
    conditions: Conditions


@dataclass(frozen=True)
class Straggler:
    """Workers whose steps take `slowdown` times their core seconds with probability `chance`."""

    ranks: frozenset[Rank]
    slowdown: float
    chance: float = 1.0
    begins_s: float = 0.0
    ends_s: float = float("inf")


@dataclass(frozen=True)
class Absence:
    """A worker's absence. Without `leaves_s` from the start, without `comes_s` to the end."""

    rank: Rank
    leaves_s: float | None = None
    comes_s: float | None = None


@dataclass(frozen=True)
class HardwareThrottle:
    """What a machine does by itself: it slows down at `trip_celsius`, until `resume_celsius`."""

    trip_celsius: float
    resume_celsius: float
    speed: float
    """Share of the machine's speed meanwhile."""
    power: float
    """Share of the power above idle meanwhile."""


@dataclass(frozen=True)
class Thermals:
    """How one machine warms up: C dT/dt = P - (T - ambient) / R."""

    joules_per_kelvin: float
    kelvin_per_watt: float
    idle_watts: float
    busy_watts: float
    ambient: tuple[tuple[float, float], ...]
    """Seconds after the start, and degrees Celsius from then on; the first is at 0."""
    throttle: HardwareThrottle | None = None


@dataclass(frozen=True)
class CoLocatedDemand:
    """What other work on one machine takes."""

    phases: tuple[tuple[float, float], ...]
    """Seconds of each, one after another, and the relative units of compute that it takes."""
    repeats: bool = True
    """Whether the first phase follows the last; otherwise the last one stays."""


@dataclass(frozen=True)
class Plan:
    """An environment applied to a job's workers on a given machine.

    The *shape* of the pipes (which links share one) never changes, except with a radio, which is
    for virtual time, as stragglers and absences are: a change sets other rates, latencies, losses,
    quotas and cuts.
    """

    environment: str
    workers: tuple[WorkerIdentity, ...]
    core_scale: float
    """CPU cores per relative unit of the environment file."""
    samples_per_s_per_core: float
    """Speed of one relative unit in virtual time (a machine has `quota_cores / core_scale` of
    them)."""
    initial: Conditions
    changes: tuple[ConditionsChange, ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    absences: tuple[Absence, ...] = ()
    """Absences in order of worker and time; those of one worker do not overlap."""
    thermals: Mapping[Rank, Thermals] = field(default_factory=dict)
    """Thermal properties of the workers whose temperature is simulated."""
    demands: Mapping[Rank, CoLocatedDemand] = field(default_factory=dict)
    """Other work on the machines of workers, in virtual time."""
    message_overhead_bytes: int = MESSAGE_OVERHEAD_BYTES
    """Bytes of a message that take link time in virtual time; counters count payloads only, as on a
    real link."""
    probed_bytes_per_s: Mapping[tuple[Rank, Rank], float] = field(default_factory=dict)
    """Result of the first probe of a link (sender, receiver) in virtual time, if it is known to
    differ from the link's rate."""

    def at(self, time_s: float) -> Conditions:
        """The conditions `time_s` after the start of the run."""
        current = self.initial
        for change in self.changes:
            if change.time_s <= time_s:
                current = change.conditions
        return current

    def _all_conditions(self) -> Iterator[WorkerConditions]:
        for conditions in (self.initial, *(change.conditions for change in self.changes)):
            yield from conditions.workers

    @property
    def shapes_links(self) -> bool:
        """Whether any link has a rate, a latency or a cut at any time."""
        return self.asks_for_latency or any(
            worker.uplink or worker.downlink or worker.cut_peers
            for worker in self._all_conditions()
        )

    @property
    def changes_links(self) -> bool:
        """Whether any link's rate or cut changes during the run."""
        return any(
            (now.uplink, now.downlink, now.cut_peers)
            != (then.uplink, then.downlink, then.cut_peers)
            for change in self.changes
            for now, then in zip(self.initial.workers, change.conditions.workers, strict=True)
        )

    @property
    def asks_for_latency(self) -> bool:
        """Whether any link has a latency at any time."""
        return any(any(worker.latency_s.values()) for worker in self._all_conditions())

    @property
    def limits_cpu(self) -> bool:
        """Whether any worker has a quota at the start."""
        return any(worker.quota_cores is not None for worker in self.initial.workers)


def unlimited_plan(workers: tuple[WorkerIdentity, ...]) -> Plan:
    """A plan without limits, for `dlion run` without `--environment`."""
    return Plan(
        environment="",
        workers=workers,
        core_scale=1.0,
        samples_per_s_per_core=1.0,
        initial=Conditions(tuple(WorkerConditions(worker.rank) for worker in workers)),
    )
