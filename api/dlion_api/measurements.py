"""What trainer and sidecar tell each other over their Unix socket.

Trainer to sidecar: `SpeedProbe`, `StepTiming`, `LinkDelivery`, `CpuAllowance`, `Peers`,
`StreamRefusals`. Sidecar to trainer: `MeasuringEndpoint`, `MeasuringRefused`, `Directive`.
`local_messages` gives their form on the socket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from dlion_api.membership import Membership
from dlion_api.names import Rank


@dataclass(frozen=True)
class SpeedProbe:
    """Gradients that the trainer computed before its first step, to be measured and thrown away.

    `compute_s` is their wall time, `cpu_s` the process's CPU seconds and `throttled_s` the time
    that its quota held it meanwhile (0 where the machine does not tell); `quota_cores` is the
    quota all along. `largest_batch`: samples of the largest batch in them.
    """

    samples: int
    compute_s: float
    cpu_s: float
    throttled_s: float
    quota_cores: float | None
    largest_batch: int


@dataclass(frozen=True)
class GradientNorms:
    """Squared norms of one iteration: of this worker's gradient, and of all workers' mean."""

    own_square: float
    own_samples: int
    mean_square: float
    mean_samples: int


@dataclass(frozen=True)
class StepTiming:
    """One local step, as the trainer saw it.

    `compute_s` is wall time in the gradient alone; `wall_s` from the start of this step to the
    start of the next, exchange and waiting included; `cpu_s` the process's CPU seconds meanwhile.
    Sent once per iteration, after that iteration's `LinkDelivery` records.
    """

    iteration: int
    samples: int
    compute_s: float
    wall_s: float
    cpu_s: float
    compute_cpu_s: float | None = None
    """The process's CPU seconds of this iteration, less what exchanging took of them: what it would
    take without peers; None where that is not known (`cpu_s` stands in for it)."""
    waited_s: float | None = None
    """Of `wall_s`, what synchronisation held this worker; None where that is not known (the link
    budgets then follow `compute_s` alone)."""
    exchanged_bytes: int | None = None
    """Sent to and received from all peers in this iteration; None where that is not known."""
    quota_changed: bool = False
    """The trainer's CPU quota changed while the step went on: it is a measure of neither."""
    norms: GradientNorms | None = None
    """Under batching policy `goodput`, where the iteration had an update."""


@dataclass(frozen=True)
class LinkDelivery:
    """Bytes that one peer has acknowledged since the last report on that link.

    `receiver_busy_s` is the time the *receiver* saw pass between back-to-back frames carrying
    `busy_bytes` (the sender had more to send all along): their quotient is the link's rate.
    Both are 0 where nothing was back-to-back. `unacknowledged_bytes` is what is under way now.
    """

    peer: Rank
    acknowledged_bytes: int
    busy_bytes: int
    receiver_busy_s: float
    unacknowledged_bytes: int


@dataclass(frozen=True)
class CpuAllowance:
    """The trainer's own quota and use: in a pod the sidecar cannot see another container's.

    `cpu_s` and `throttled_s` are sums since the trainer began; `throttled_s` is 0 where the
    machine does not tell. Sent at the start and again after some iterations, and with the first
    step at whose end the quota is another one.
    """

    quota_cores: float | None
    cpu_s: float
    throttled_s: float


@dataclass(frozen=True)
class Peers:
    """The membership as the trainer has it, with the training set's size, for the sidecar."""

    membership: Membership
    training_set_samples: int
    own_samples: int = 0
    """Of those, this worker's; 0: not told."""
    trust: str = ""
    """By which authorities they are known (`dlion_api.trust`); empty: by none, or not told."""


@dataclass(frozen=True)
class RefusalCount:
    """How often a worker refused callers for a reason, or (`dialled`) was refused itself."""

    kind: str
    """A `dlion_api.refusals.PeerRefusal`."""
    dialled: bool
    count: int


@dataclass(frozen=True)
class StreamRefusals:
    """All that was refused at the exchange since the trainer began, for the sidecar's metrics."""

    counts: tuple[RefusalCount, ...]


@dataclass(frozen=True)
class MeasuringRefused:
    """What the sidecar refused, or was refused, in words for the run's events."""

    words: str


@dataclass(frozen=True)
class MeasuringEndpoint:
    """Where this sidecar answers its peers' probes, for the trainer to announce."""

    address: str


class CapacitySource(StrEnum):
    """How a capacity was found."""

    UNKNOWN = "Unknown"  # nothing measured yet: an even share
    RATE = "Rate"  # samples divided by wall time over at least a second
    QUOTA = "Quota"  # CPU quota divided by CPU seconds per sample


@dataclass(frozen=True)
class GradientNoise:
    """One worker's estimates of the true gradient's squared norm and of the trace of a single
    sample's covariance, without bias: either may be negative. They count by `weight`, 0 to 1."""

    square: float
    variance: float
    weight: float


@dataclass(frozen=True)
class BatchChoice:
    """A global batch that a sidecar has chosen under batching policy `goodput`."""

    period: int
    """The how many-th choice of the run it is, from 1 on."""
    decider: Rank
    """Whose sidecar made it."""
    size: int
    """Samples of an iteration, over all workers."""


@dataclass(frozen=True, order=True)
class Grouping:
    """Workers in groups, with a gateway each (`exchange.topology: clustered`).

    Of two that are told the larger counts, everywhere: versions first, what is left decides
    between two of one version. So whoever has heard the same ones holds the same one, in
    whatever order they came.
    """

    version: int
    """0: by sites, as the manifest has them; each later one has the next number."""
    decider: Rank
    """Whose sidecar made it."""
    groups: tuple[tuple[Rank, ...], ...]
    """All workers of the job, each once; members in order, groups by their first member."""
    gateways: tuple[Rank, ...]
    """Of each group, the member that is linked with the other groups' gateways."""


@dataclass(frozen=True)
class Capacity:
    """A worker's relative compute power, in samples per second of wall time."""

    rank: Rank
    samples_per_s: float
    window_s: float
    source: CapacitySource
    iteration: int
    training_set_samples: int = 0
    """All workers' samples as that worker counts them: where the data grows, as if all had as many
    as it has itself, so that the mean over workers is right. 0: not told."""
    own_samples: int = 0
    """Samples that this worker trains on; 0: not told."""
    noise: GradientNoise | None = None
    """Under batching policy `goodput`; None: not known."""
    exchange_s: float = 0.0
    """Of an iteration, what is not computing, waiting included; 0: not told."""
    batch_choice: BatchChoice | None = None
    """The one that its sidecar holds, under batching policy `goodput`."""
    link_bytes_per_s: Mapping[Rank, float] = field(default_factory=dict)
    """What that worker's link to each other one carries, by probes; only where groups go by it."""
    grouping: Grouping | None = None
    """The one that its sidecar holds, where there are groups."""


@dataclass(frozen=True)
class Directive:
    """What the sidecar tells its trainer to do from the next step on, and why."""

    version: int
    local_batch_size: int
    global_batch_size: int
    budget_bytes: Mapping[Rank, int] = field(default_factory=dict)
    """Bytes per iteration for each link; a link that is not named has no budget yet: unbounded."""
    capacities: Mapping[Rank, float] = field(default_factory=dict)
    """Samples per second of every worker, as known here."""
    bandwidth_bytes_per_s: Mapping[Rank, float] = field(default_factory=dict)
    reason: str = ""
    grouping: Grouping | None = None
    """Who is linked with whom from now on, where groups decide that."""
    training_set_samples: int = 0
    """Of all workers together, as each has told its own; 0: not all have told yet."""
