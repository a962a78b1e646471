"""Records that trainer and sidecar exchange over their Unix socket.

Trainer to sidecar: `SpeedProbe`, `StepTiming`, `LinkDelivery`, `CpuAllowance`, `Peers`,
`StreamRefusals`. Sidecar to trainer: `MeasuringEndpoint`, `MeasuringRefused`, `MeasuringSent`,
`Directive`. `sidecar_protocol` encodes them.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from enum import StrEnum

from dlion_api.names import Rank
from dlion_api.protocol.membership import Membership


@dataclass(frozen=True)
class SpeedProbe:
    """Timing of gradients that the trainer computed before its first step and discarded.

    `compute_s` is wall time, `cpu_s` the process's CPU time, `throttled_s` the time throttled by
    the quota (0 if the machine does not report it), `quota_cores` the unchanged quota.
    `largest_batch` is in samples.
    """

    samples: int
    compute_s: float
    cpu_s: float
    throttled_s: float
    quota_cores: float | None
    largest_batch: int


@dataclass(frozen=True)
class GradientNorms:
    """Squared norms of this worker's gradient and of all workers' mean, in one iteration."""

    own_square: float
    own_samples: int
    mean_square: float
    mean_samples: int


@dataclass(frozen=True)
class PhaseSeconds:
    """Wall seconds of one step's exchange. The first five are of the main thread and do not
    overlap; with computing and waiting they are at most the step's wall time."""

    select_s: float = 0.0
    encode_s: float = 0.0
    send_s: float = 0.0
    """Putting messages into the links' queues."""
    decode_s: float = 0.0
    """Checking, decoding and adding up the peers' messages."""
    apply_s: float = 0.0
    """Changing the weights."""
    link_send_s: float = 0.0
    """Seconds of the exchange's thread that cut messages into frames; not part of the wall time."""
    link_receive_s: float = 0.0
    """There, too: checking frames and joining them to messages."""

    @property
    def main_s(self) -> float:
        """The main thread's part."""
        return self.select_s + self.encode_s + self.send_s + self.decode_s + self.apply_s


@dataclass(frozen=True)
class StepTiming:
    """Timing of one local step, measured by the trainer.

    `compute_s` is the wall time of the gradient. `wall_s` lasts from this step's start to the
    next one's, including exchange and waiting; `cpu_s` is the process's CPU time in it. Sent once
    per iteration, after its `LinkDelivery` records.
    """

    iteration: int
    samples: int
    compute_s: float
    wall_s: float
    cpu_s: float
    compute_cpu_s: float | None = None
    """CPU seconds of this iteration without the exchange; None: unknown, `cpu_s` is used."""
    waited_s: float | None = None
    """Part of `wall_s` spent waiting for synchronisation; None: unknown, link budgets then follow
    `compute_s` only."""
    exchanged_bytes: int | None = None
    """Sent to and received from all peers in this iteration; None: unknown."""
    quota_changed: bool = False
    """The trainer's CPU quota changed during the step, so it measures neither quota."""
    norms: GradientNorms | None = None
    """Norms with batching policy `goodput`, if the iteration had an update."""
    phases: PhaseSeconds = field(default_factory=PhaseSeconds)


@dataclass(frozen=True)
class SentBytes:
    """Bytes sent on one link, by kind; the kinds do not overlap."""

    gradient_bytes: int = 0
    weights_bytes: int = 0
    control_bytes: int = 0
    """Messages that are neither gradients nor weights."""
    header_bytes: int = 0
    """Frames' headers, acknowledgements, greetings and heartbeats."""
    state_bytes: int = 0
    """Whole states that the peer pulled."""
    probe_bytes: int = 0
    """Bytes from sidecar to sidecar: probes of the link, and capacities."""

    def since(self, earlier: "SentBytes") -> "SentBytes":
        """The growth of each kind."""
        pairs = zip(astuple(self), astuple(earlier), strict=True)
        return SentBytes(*(now - before for now, before in pairs))


@dataclass(frozen=True)
class LinkDelivery:
    """Bytes that one peer has acknowledged since the last report on that link.

    `receiver_busy_s` is the time between back-to-back frames with `busy_bytes`, measured by the
    *receiver* while the sender always had more to send. Their quotient is the link's rate; both
    are 0 without back-to-back frames. `unacknowledged_bytes` are in flight now.
    """

    peer: Rank
    acknowledged_bytes: int
    busy_bytes: int
    receiver_busy_s: float
    unacknowledged_bytes: int
    sent: SentBytes = field(default_factory=SentBytes)
    """What was sent since the last report, for metrics. In virtual time nothing."""


@dataclass(frozen=True)
class CpuAllowance:
    """The trainer's CPU quota and use, which a sidecar in another container cannot read.

    `cpu_s` and `throttled_s` are sums since the trainer started; `throttled_s` is 0 if the machine
    does not report it. Sent at the start, periodically, and after a step in which the quota
    changed.
    """

    quota_cores: float | None
    cpu_s: float
    throttled_s: float


@dataclass(frozen=True)
class Peers:
    """The trainer's membership, training set size and position, for the sidecar."""

    membership: Membership
    training_set_samples: int
    own_samples: int = 0
    """This worker's part of them; 0: unknown."""
    trust: str = ""
    """Fingerprint of the members' CA bundles (`dlion_api.protocol.trust`); empty: none or
    unknown."""
    iteration: int = 0
    """This worker's last iteration; before its first step that of its checkpoint; 0: none."""
    global_batch_size: int = 0
    """Samples of all workers in that iteration; 0: unknown."""
    linked_lost: tuple[Rank, ...] = ()
    """Workers that the membership calls lost, and whose link to this worker is up."""


@dataclass(frozen=True)
class RefusalCount:
    """How often a worker refused callers for a reason or, if `dialled`, was refused itself."""

    kind: str
    """A `dlion_api.protocol.refusals.PeerRefusal`."""
    dialled: bool
    count: int


@dataclass(frozen=True)
class StreamRefusals:
    """All refusals of the exchange since the trainer started, for the sidecar's metrics."""

    counts: tuple[RefusalCount, ...]


@dataclass(frozen=True)
class TrainerAlive:
    """The trainer's process runs. Sent while there is nothing else to send."""


@dataclass(frozen=True)
class MeasuringRefused:
    """A message for the run's events about a refusal by or of the sidecar."""

    words: str


@dataclass(frozen=True)
class MeasuringSent:
    """Bytes that this sidecar sent to a peer's sidecar since its last such record; sent when the
    trainer has reported a step."""

    peer: Rank
    sent_bytes: int


@dataclass(frozen=True)
class MeasuringEndpoint:
    """Where this sidecar answers peers' probes; the trainer announces it."""

    address: str


class CapacitySource(StrEnum):
    """How a capacity was determined."""

    UNKNOWN = "Unknown"  # nothing measured yet: an even share
    RATE = "Rate"  # samples divided by wall time over at least a second
    QUOTA = "Quota"  # CPU quota divided by CPU seconds per sample


@dataclass(frozen=True)
class GradientNoise:
    """One worker's unbiased estimates of the gradient noise scale; either may be negative.

    `square` estimates the true gradient's squared norm, `variance` the trace of a single sample's
    covariance. `weight` is from 0 to 1.
    """

    square: float
    variance: float
    weight: float


@dataclass(frozen=True)
class BatchChoice:
    """A global batch size that a sidecar chose with batching policy `goodput`."""

    period: int
    """Number of this choice in the run, from 1."""
    decider: Rank
    """The worker with the sidecar that made it."""
    size: int
    """Samples per iteration over all workers."""


@dataclass(frozen=True, order=True)
class Grouping:
    """Workers in groups, each with a gateway (`exchange.topology: clustered`).

    Of two groupings the larger one is used, ordered by version and then by the other fields. So
    workers that received the same groupings use the same one, in whatever order these arrived.
    """

    version: int
    """0: groups by site; each later grouping has the next number."""
    decider: Rank
    """The worker with the sidecar that made it."""
    groups: tuple[tuple[Rank, ...], ...]
    """All workers of the job, each once; members in order, groups by their first member."""
    gateways: tuple[Rank, ...]
    """Each group's member that has links with the other gateways."""


@dataclass(frozen=True)
class Capacity:
    """A worker's relative compute power, in samples per second of wall time."""

    rank: Rank
    samples_per_s: float
    window_s: float
    source: CapacitySource
    iteration: int
    training_set_samples: int = 0
    """All workers' samples as that worker counts them; 0: unknown. With growing data it is its own
    number times the number of workers, so that the mean over workers is right."""
    own_samples: int = 0
    """Samples that this worker trains on; 0: unknown."""
    noise: GradientNoise | None = None
    """Noise with batching policy `goodput`; None: unknown."""
    exchange_s: float = 0.0
    """Time per iteration that is not computing, including waiting; 0: unknown."""
    batch_choice: BatchChoice | None = None
    """Its sidecar's current choice, with batching policy `goodput`."""
    link_bytes_per_s: Mapping[Rank, float] = field(default_factory=dict)
    """Probed rate of its link to each other worker, if groups depend on it."""
    grouping: Grouping | None = None
    """Its sidecar's current grouping, if there are groups."""


@dataclass(frozen=True)
class Directive:
    """The sidecar's instruction to its trainer from the next step on, with its reason."""

    version: int
    local_batch_size: int
    global_batch_size: int
    budget_bytes: Mapping[Rank, int] = field(default_factory=dict)
    """Bytes per iteration for each link; a link without an entry is unlimited."""
    capacities: Mapping[Rank, float] = field(default_factory=dict)
    """Known samples per second of each worker."""
    bandwidth_bytes_per_s: Mapping[Rank, float] = field(default_factory=dict)
    reason: str = ""
    grouping: Grouping | None = None
    """The new grouping, if the topology uses groups."""
    training_set_samples: int = 0
    """Sum of the samples that all workers reported; 0: some have not reported yet."""
    compute_share: float = 1.0
    """Share of the time in which the trainer may compute: the heat budget. The trainer rests
    between steps; waiting for peers counts as rest."""

    def __post_init__(self) -> None:
        """Raises ValueError for a share outside of 0 < share <= 1."""
        if not 0 < self.compute_share <= 1:
            raise ValueError(f"compute share {self.compute_share}; allowed: above 0, at most 1")
