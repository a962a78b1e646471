"""Parameters of exchange policies in `spec.exchange.parameters`, declared as manifest fields.

Defines names, bounds and defaults, so that `dlion validate` needs no NumPy. Policies without
parameters are not listed here.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from dlion_api.document import Limits, setting

Count = Annotated[int, Limits(minimum=0, maximum=10**6)]
"""Number of iterations, parts or a rank, that may be 0."""
PositiveCount = Annotated[int, Limits(minimum=1, maximum=10**6)]
WorkerCount = Annotated[int, Limits(minimum=0, maximum=10**4)]
PositiveWorkerCount = Annotated[int, Limits(minimum=1, maximum=10**4)]
Share = Annotated[float, Limits(above=0, maximum=1)]
Momentum = Annotated[float, Limits(minimum=0, below=1)]
Factor = Annotated[float, Limits(minimum=0, maximum=1000)]
Magnitude = Annotated[float, Limits(minimum=0, maximum=10**9)]


@dataclass(frozen=True, kw_only=True)
class NoParameters:
    """Parameters of policies that have none."""


@dataclass(frozen=True, kw_only=True)
class AkoParameters:
    """Parameters of `ako`."""

    partitions: Count = setting(
        "number of parts of a gradient (p); 0: the smallest number with parts that fit the"
        " narrowest link's budget.",
        default=0,
    )
    max_partitions: PositiveCount = setting(
        "maximum of p if budgets determine it (ours).", default=100
    )


@dataclass(frozen=True, kw_only=True)
class AdacompParameters:
    """Parameters of `adacomp`."""

    share: Share = setting(
        "share of each variable's entries that is sent, at least one.", default=0.01
    )
    bound: Count = setting(
        "iterations that a worker may be ahead of its slowest partner (ours).", default=16
    )
    server: Count | None = setting(
        "rank of the worker in the parameter server's role; by default, peer to peer.", default=None
    )
    step: Literal["whole", "share"] = setting(
        "each gradient is a full step as published (whole), or is weighted by the manifest's"
        " weighting (share).",
        default="share",
    )


@dataclass(frozen=True, kw_only=True)
class AsyncParameters:
    """Parameters of `async`."""

    compensation: Factor = setting(
        "lambda of the delay compensation; 0: none (0.04 in its paper, as recalled).", default=0.0
    )
    bound: Count = setting(
        "iterations that a worker may be ahead of its slowest partner (ours).", default=16
    )
    server: Count | None = setting(
        "rank of the worker in the parameter server's role; by default, peer to peer.", default=None
    )
    step: Literal["whole", "share"] = setting(
        "each gradient is a full step (whole), or is weighted by the manifest's weighting (share).",
        default="share",
    )


@dataclass(frozen=True, kw_only=True)
class HierarchicalParameters:
    """Parameters of `hierarchical`."""

    inside_share: Share = setting(
        "share of a gradient's entries, the largest, sent inside a site (our default).",
        default=1.0,
    )
    between_share: Share = setting(
        "share of the entries of a site's mean sent between sites (our default).", default=0.1
    )
    combine: Literal["mean", "median", "trimmed"] = setting(
        "the sites' means are combined by their sample-weighted mean, or by a robust one with"
        " equal weights of sites (our default).",
        default="mean",
    )
    trim: WorkerCount = setting(
        "sites left out at either end of a trimmed mean, per entry (our default).", default=1
    )
    group_size: WorkerCount = setting(
        "maximum workers of a site that exchange directly; 0: all of it (our default).", default=0
    )


@dataclass(frozen=True, kw_only=True)
class DgcParameters:
    """Parameters of `dgc`."""

    share: Share = setting(
        "share of each variable's entries sent after the warm-up, at least one.", default=0.001
    )
    warmup_stages: int = setting(
        "stages of the warm-up, in which the share decreases; 0: no warm-up.",
        default=4,
        minimum=0,
        maximum=100,
    )
    warmup_every_steps: PositiveCount = setting(
        "iterations of each stage (ours; an epoch as published).", default=50
    )
    momentum: Momentum = setting(
        "momentum of the velocity; the optimizer must have none (as recalled).", default=0.9
    )
    masking: bool = setting("whether the velocity of sent entries is reset to 0.", default=True)
    clip_norm: Magnitude = setting(
        "norm to which gradients are clipped, divided by the root of the number of workers"
        " (our default); 0: no clipping.",
        default=0.0,
    )


@dataclass(frozen=True, kw_only=True)
class DemoParameters:
    """Parameters of `demo`."""

    momentum: Momentum = setting(
        "beta, by which the momentum decays; the optimizer must have none (as recalled).",
        default=0.999,
    )
    chunk: Annotated[int, Limits(minimum=1, maximum=1024)] = setting(
        "entries of a variable that are transformed together (as recalled).", default=64
    )
    coefficients: PositiveCount = setting(
        "k, number of coefficients of a chunk that are sent, the largest (our default).", default=2
    )
    step: Literal["plain", "sign"] = setting(
        "the optimizer gets the mean, or its sign, which needs a much lower learning rate.",
        default="plain",
    )


@dataclass(frozen=True, kw_only=True)
class TwostepParameters:
    """Parameters of `twostep`."""

    threshold: Magnitude = setting(
        "minimum magnitude of a released entry; 0: only the links determine it (our default).",
        default=0.0,
    )
    ratio: Share = setting(
        "maximum time of a release (latency + bytes / bandwidth), relative to the time"
        " computed since the last one (our default).",
        default=1.0,
    )
    momentum: Momentum = setting(
        "momentum of the velocity; the optimizer must have none (our default).", default=0.9
    )
    combine_every_steps: Count = setting(
        "iterations between two combinations of the sites' models; 0: none (ours).", default=0
    )
    bound: Count = setting(
        "iterations that a worker may be ahead of its slowest partner (ours).", default=16
    )


@dataclass(frozen=True, kw_only=True)
class TopKParameters:
    """Parameters of `topk`."""

    share: float = setting(
        "share of the entries sent on every link (our default); 0: as many as each link's"
        " budget carries.",
        default=0.01,
        minimum=0,
        maximum=1,
    )
    residual: Literal["none", "shared", "perLink"] = setting(
        "entries that are not sent are lost (none), kept once for all links (shared), or kept"
        " per link (perLink).",
        default="shared",
    )


# ---- policies that exchange weights or updates ---------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AdpsgdParameters:
    """Parameters of `adpsgd`."""

    graph: Literal["complete", "ring"] = setting(
        "whether workers at even positions (by rank) pair with all at odd ones, or with ring"
        " neighbours (our default).",
        default="complete",
    )
    overlap: bool = setting(
        "whether an active worker continues to compute while it waits for weights (our default).",
        default=True,
    )


@dataclass(frozen=True, kw_only=True)
class D2Parameters:
    """Parameters of `d2`."""

    mixing: Literal["complete", "ring"] = setting(
        "W gives each worker 1/n, or only itself and its ring neighbours (our default).",
        default="complete",
    )
    self_weight: float = setting(
        "weight of a worker in its own row of W, on a ring (our default).",
        default=0.5,
        above=1 / 3,
        maximum=1,
    )


@dataclass(frozen=True, kw_only=True)
class EventgradParameters:
    """Parameters of `eventgrad`."""

    graph: Literal["complete", "ring"] = setting(
        "neighbours of a worker: all members, or its ring neighbours by rank.", default="ring"
    )
    horizon: Factor = setting(
        "factor of the threshold per iteration without sending; the threshold starts as the"
        " norm's recent change per iteration; 0: send always.",
        default=1.0,
    )
    threshold: Magnitude | None = setting(
        "fixed threshold of every variable, instead of the adaptive one.", default=None
    )
    warmup_steps: Count = setting("steps before which everything is sent.", default=30)
    max_silent_steps: Count = setting(
        "maximum steps without sending a variable; 0: no limit (ours).", default=50
    )
    bound: Count = setting(
        "iterations that a worker may be ahead of the slowest; 0: lock step (our default).",
        default=5,
    )


@dataclass(frozen=True, kw_only=True)
class GaiaParameters:
    """Parameters of `gaia`."""

    threshold: Factor = setting(
        "S: an update is significant above this share of the weight (as recalled).", default=0.01
    )
    decay: Literal["lr", "inv_sqrt", "none"] = setting(
        "the threshold follows the learning rate (lr), is divided by the root of the steps"
        " (inv_sqrt), or is constant (none).",
        default="lr",
    )
    clock_bound: Count = setting(
        "iterations that a worker may be ahead of the slowest (our default).",
        default=5,
        unit="iterations",
    )


@dataclass(frozen=True, kw_only=True)
class FedatParameters:
    """Parameters of `fedat`."""

    server: Count = setting("rank of the worker in the server's role.", default=0)
    tiers: tuple[PositiveWorkerCount, ...] = setting(
        "tier of each worker by rank, 1 is the fastest; by default, by the order of their answers.",
        default=(),
        max_items=10000,
    )
    tier_count: PositiveWorkerCount = setting(
        "M, the number of tiers if the order of answers defines them (our default).", default=3
    )
    profile_rounds: int = setting(
        "number of first rounds, of all workers, that define the order of answers (our default).",
        default=2,
        minimum=1,
        maximum=1000,
    )
    local_steps: PositiveCount = setting(
        "iterations between two answers of a worker (our default).", default=10
    )
    proximal: Factor = setting(
        "lambda, weight of the proximal term towards the global weights (as recalled).", default=0.4
    )
    decimals: int = setting(
        "decimals of weights sent as polylines (as recalled).", default=4, minimum=0, maximum=9
    )


@dataclass(frozen=True, kw_only=True)
class HopParameters:
    """Parameters of `hop`."""

    backup_workers: WorkerCount = setting(
        "b: members that may be missing from an average (as recalled).", default=1
    )
    staleness: int = setting(
        "s: maximum age of averaged weights in iterations (as recalled).",
        default=5,
        minimum=0,
        maximum=100,
        unit="iterations",
    )
    max_gap: int = setting(
        "finished steps that a worker may be ahead of a member (our default).",
        default=8,
        minimum=1,
        maximum=1000,
        unit="iterations",
    )
    skip_behind: int = setting(
        "steps behind every member at which a worker skips iterations; 0: never (our default).",
        default=4,
        minimum=0,
        maximum=1000,
        unit="iterations",
    )
