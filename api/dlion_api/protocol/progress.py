"""Progress records that workers report to the coordinator; each is a line of `events.jsonl`.

A record is one JSON object with its kind (`record_to_json`, `record_from_json`). Times are seconds
since the run began, on the worker's monotonic clock, with the offset that the coordinator sends at
joining. Wall clocks of different machines are never compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dlion_api.names import Rank
from dlion_api.reasons import EventReason

MAX_METRICS = 64
"""Figures of a program that are recorded beside accuracy and loss."""
START_PHASES = ("import_s", "data_s", "model_s", "join_s", "speed_s")
END_PHASES = ("final_wait_s", "gather_s", "evaluate_s", "save_s", "close_s")
"""Fields of `ProcessRecord` before the first step and after the last, in order."""
_WORKER_REASONS = frozenset(map(str, EventReason))


@dataclass(frozen=True)
class StepRecord:
    """One iteration of one worker."""

    time_s: float
    rank: Rank
    incarnation: int
    iteration: int
    loss: float
    local_batch_size: int
    global_batch_size: int
    learning_rate: float
    compute_s: float
    wall_s: float
    cpu_s: float
    exchange_cpu_s: float
    """CPU seconds of select, encode, decode and apply in this iteration."""
    waited_s: float
    """Part of `wall_s` spent waiting for synchronisation."""
    samples: int
    """This worker's samples since the run began."""
    weights_hash: str = ""
    """Hash of the weights after this step, with `trainer.hashWeights`."""
    epochs: float | None = None
    """Passes of all workers over the job's training data so far, as this worker counts them; None:
    unknown."""
    waited_for: tuple[int, ...] = ()
    """Ranks of the peers that came last, if this worker waited for some."""
    select_s: float | None = None
    """Part of `wall_s` in which the policy chose what to send. This and the next four are of the
    main thread and do not overlap; the rest of `wall_s` is none of them. None: not measured, as in
    records of older releases."""
    encode_s: float | None = None
    send_s: float | None = None
    """Putting messages into the links' queues."""
    decode_s: float | None = None
    """Checking, decoding and adding up the peers' messages."""
    apply_s: float | None = None
    """Changing the weights."""
    link_send_s: float | None = None
    """Seconds of the exchange's thread that cut messages into frames; not part of `wall_s`."""
    link_receive_s: float | None = None
    """There, too: checking frames and joining them to messages."""
    passes: int | None = None
    """Passes over its own samples that this incarnation has begun; None: not counted, as without
    `trainer.privacy`."""
    earlier_passes: int | None = None
    """Passes of this worker's earlier starts, reported or not, as its folder has them; None: not
    kept."""
    trained_s: float | None = None
    """Seconds of the run's training at the end of the step, as `maxSeconds` counts them: without
    start-up, and with those before a resume. None: unknown, as in a simulation."""

    @property
    def began_s(self) -> float:
        """Start of the step, on the same clock as its end, `time_s`."""
        return self.time_s - self.wall_s


@dataclass(frozen=True)
class LinkRecord:
    """One link in one direction, since its last record."""

    time_s: float
    rank: Rank
    peer: Rank
    iteration: int
    sent_bytes: int
    acknowledged_bytes: int
    unacknowledged_bytes: int
    queued_bytes: int
    budget_bytes: int | None
    bandwidth_bytes_per_s: float | None
    dropped_messages: int
    connected: bool
    remade_count: int = 0
    """How often its stream has moved to a new connection without interruption."""
    weights_bytes: int = 0
    """Part of `sent_bytes`: weights."""
    control_bytes: int = 0
    """Part of `sent_bytes`: neither gradients nor weights."""
    header_bytes: int = 0
    """Beside `sent_bytes`: frames' headers, acknowledgements, greetings and heartbeats."""
    state_bytes: int = 0
    """Beside `sent_bytes`: whole states that the peer pulled."""
    probe_bytes: int = 0
    """Beside `sent_bytes`: what the sidecar sent to the peer's sidecar, probes and capacities."""
    neighbour: bool = True
    """Whether the workers are linked. States and probes go to others, too."""
    sent_segments: int | None = None
    """This and the next three are of the TCP connections open at the end of training, since each
    began; None: in records before it, or unknown. Here segments with data, repeated ones included.
    """
    retransmitted_segments: int | None = None
    round_trip_s: float | None = None
    """The longest one, smoothed: it includes the time in queues."""
    min_round_trip_s: float | None = None
    """The shortest one of the last five minutes."""


@dataclass(frozen=True)
class EvaluationRecord:
    """Evaluation of one replica on the held-out data."""

    time_s: float
    rank: Rank
    iteration: int
    samples: int
    accuracy: float
    loss: float
    evaluated_samples: int
    class_accuracy: tuple[float, ...] = ()
    sketch: tuple[float, ...] = ()
    """A random projection of the weights, with a shared seed, for `dlion_api.drift`."""
    weights_norm: float = 0.0
    final: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other figures of the program's, by their names."""
    accuracy_name: str = ""
    """`status_names.R_SQUARED`; empty: it is an accuracy."""


@dataclass(frozen=True)
class DirectiveRecord:
    """A directive from the sidecar to its trainer, with its reason."""

    time_s: float
    rank: Rank
    iteration: int
    local_batch_size: int
    global_batch_size: int
    budget_bytes: Mapping[Rank, int] = field(default_factory=dict)
    capacities: Mapping[Rank, float] = field(default_factory=dict)
    bandwidth_bytes_per_s: Mapping[Rank, float] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class ProcessRecord:
    """What one trainer process has spent its time on, from its start to this record, in seconds.

    A process is in one phase at a time, so the phases add up to its age. Reported before the first
    step and at the end; the later one counts.
    """

    time_s: float
    rank: Rank
    incarnation: int
    iteration: int
    import_s: float = 0.0
    """Python's and TensorFlow's imports, and reading the manifest."""
    data_s: float = 0.0
    """The program's import and the data."""
    model_s: float = 0.0
    """Building and compiling the model."""
    join_s: float = 0.0
    """Certificate, checkpoint, links, waiting for the other workers, and callbacks."""
    speed_s: float = 0.0
    """Measuring the own speed and waiting for the others' (`batching.policy: weighted`)."""
    train_s: float = 0.0
    """Seconds from the first step to the reason to stop."""
    final_wait_s: float = 0.0
    """Waiting for the others' last round, and for the saved model of another worker."""
    gather_s: float = 0.0
    """Pulling the others' replicas."""
    evaluate_s: float = 0.0
    """Evaluations after the last step."""
    save_s: float = 0.0
    """Saving checkpoint and model, and uploading them."""
    close_s: float = 0.0
    """The last callbacks, and closing links and threads."""


@dataclass(frozen=True)
class EventRecord:
    """An event with a stable reason, as in Kubernetes."""

    time_s: float
    rank: Rank
    iteration: int
    reason: str
    message: str
    warning: bool = False

    @property
    def is_of_worker(self) -> bool:
        """Whether a worker reported it. Else the operator did, about the job, and `rank` is 0."""
        return self.reason in _WORKER_REASONS


ProgressRecord = (
    StepRecord | LinkRecord | EvaluationRecord | DirectiveRecord | ProcessRecord | EventRecord
)
