"""Parameters of the policies with rounds of local steps, as in `parameters`. Without NumPy, too."""

from dataclasses import dataclass
from typing import Annotated, Literal

from dlion_api.document import Limits, setting
from dlion_core.policies.parameters import Count, Momentum, PositiveCount, Share


@dataclass(frozen=True, kw_only=True)
class LocalsgdParameters:
    """Parameters of `localsgd`."""

    local_steps: PositiveCount = setting(
        "H, iterations between two averages (our default).", default=10
    )
    outer_learning_rate: float = setting(
        "learning rate of the outer step; 1 without momentum: the plain mean (DiLoCo's, as"
        " recalled).",
        default=0.7,
        above=0,
        maximum=10,
    )
    outer_momentum: Momentum = setting(
        "momentum of the outer step (our default; 0.9 in DiLoCo, as recalled).", default=0.5
    )
    nesterov: bool = setting("whether the outer momentum is Nesterov's.", default=True)


@dataclass(frozen=True, kw_only=True)
class QuorumDilocoParameters:
    """Parameters of `quorum-diloco`."""

    local_steps: PositiveCount = setting(
        "H, iterations between two changes that a worker sends (our default).", default=10
    )
    overlap_steps: Count = setting(
        "t, further iterations while a worker waits for the answer (our default).", default=2
    )
    quorum: Share = setting(
        "part of the workers whose changes an outer step needs (our default).", default=0.5
    )
    grace: float = setting(
        "part of the free time in which the server waits for further changes (our default); 0:"
        " only for the quorum.",
        default=1.0,
        minimum=0,
        maximum=1,
    )
    weights: Literal["rate", "samples"] = setting(
        "changes count by samples times samples per step (as recalled), or by samples.",
        default="rate",
    )
    outer_learning_rate: float = setting(
        "learning rate of the outer step (DiLoCo's, as recalled).",
        default=0.7,
        above=0,
        maximum=10,
    )
    outer_momentum: Momentum = setting(
        "Nesterov momentum of the outer step (our default; 0.9 in DiLoCo, as recalled).",
        default=0.5,
    )


@dataclass(frozen=True, kw_only=True)
class HalosParameters:
    """Parameters of `halos`."""

    local_steps: PositiveCount = setting(
        "H, iterations between two changes that a worker sends.", default=8
    )
    accumulate: PositiveCount = setting(
        "K, changes in a site between two that it sends to the global server (our default).",
        default=8,
    )
    merge_weight: Share = setting(
        "a, part of the global weights that a site's server takes.", default=0.25
    )
    local_learning_rate: float = setting(
        "learning rate of a site's server.", default=0.2, above=0, maximum=10
    )
    local_momentum: Momentum = setting("momentum of a site's server.", default=0.9)
    local_period: PositiveCount = setting(
        "changes between two updates of that momentum's velocity.", default=16
    )
    global_learning_rate: float = setting(
        "learning rate of the global server.", default=0.15, above=0, maximum=10
    )
    global_momentum: Momentum = setting("momentum of the global server.", default=0.5)
    global_period: PositiveCount = setting(
        "changes of sites between two updates of that momentum's velocity.", default=2
    )


@dataclass(frozen=True, kw_only=True)
class AdaptiveParameters:
    """Parameters of `adaptive`."""

    local_steps: Annotated[int, Limits(minimum=1, maximum=64)] | None = setting(
        "H, iterations of a round; by default, chosen by capacity and links.", default=None
    )
    density: Share | None = setting(
        "part of the entries that is sent, the largest; by default, as the narrowest link allows.",
        default=None,
    )
    min_density: Share = setting("minimum of that part, however narrow the link.", default=0.005)
    transfer_share: Share = setting(
        "time of a transfer, relative to the time of the round's local steps.", default=0.15
    )
    codec: Literal["float32", "float16", "int8", "int4"] = setting(
        "encoding of the values; replaces `exchange.codec`.", default="int4"
    )
    error_feedback: bool = setting(
        "whether entries that are not sent are added to the next round's.", default=True
    )
    outer_learning_rate: float = setting(
        "learning rate of the outer step; 1 without momentum: the plain mean.",
        default=1.0,
        above=0,
        maximum=10,
    )
    outer_momentum: Momentum | None = setting(
        "Nesterov momentum of the outer step; by default that of optimizer sgd, and local steps"
        " have none.",
        default=None,
    )


@dataclass(frozen=True, kw_only=True)
class SparselocoParameters:
    """Parameters of `sparseloco`."""

    local_steps: Annotated[int, Limits(minimum=1, maximum=1000)] = setting(
        "H, iterations of a round (our default).", default=10
    )
    share: Share = setting(
        "share of each chunk's entries that is sent, the largest, at least one (as recalled).",
        default=0.03,
    )
    chunk: PositiveCount = setting(
        "entries of a variable among which the largest are chosen (as recalled).", default=4096
    )
    codec: Literal["float32", "float16", "int8", "int4", "int2"] = setting(
        "encoding of the values; replaces `exchange.codec`.", default="int2"
    )
    feedback: float = setting(
        "beta, by which what was not sent decays until the next round (as recalled); 0: it is"
        " lost.",
        default=0.95,
        minimum=0,
        maximum=1,
    )
    outer_learning_rate: float = setting(
        "alpha, learning rate of the outer step (our default); 1: the plain mean.",
        default=1.0,
        above=0,
        maximum=10,
    )


@dataclass(frozen=True, kw_only=True)
class StagedParameters:
    """Parameters of `staged`."""

    bits: Literal["auto", "2", "4", "8"] = setting(
        "bits of a feature; auto: the most with which a worker's samples arrive in time.",
        default="auto",
    )
    arrive_within: float = setting(
        "time for the features of all samples of a worker, for bits auto (our default).",
        default=60.0,
        above=0,
        maximum=10**6,
        unit="seconds",
    )
    start_fraction: Share = setting(
        "part of the samples of the linked workers with which training starts (our default).",
        default=0.5,
    )
    start_within: float = setting(
        "time after which training starts with fewer, and names the workers (our default).",
        default=300.0,
        above=0,
        maximum=10**6,
        unit="seconds",
    )
