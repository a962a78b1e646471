"""What each exchange policy takes in `spec.exchange.parameters`, declared as manifests are.

Owns names, bounds and defaults, so that `dlion validate` needs no NumPy. A policy without
parameters has none here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from dlion_api.document import Limits, setting


@dataclass(frozen=True, kw_only=True)
class NoParameters:
    """For policies that take none."""


@dataclass(frozen=True, kw_only=True)
class AkoParameters:
    """For `ako`."""

    partitions: int = setting(
        "into how many parts a gradient is cut (p); 0: the smallest number whose part fits the"
        " narrowest link's budget.",
        default=0,
        minimum=0,
        maximum=10**6,
    )
    most_partitions: int = setting(
        "p never above this where budgets choose it (ours).",
        default=100,
        minimum=1,
        maximum=10**6,
    )


@dataclass(frozen=True, kw_only=True)
class AdacompParameters:
    """Of `adacomp`."""

    share: float = setting(
        "share of each variable's entries that is sent, at least one.",
        default=0.01,
        above=0,
        maximum=1,
    )
    bound: int = setting(
        "iterations that a worker may be ahead of its slowest partner (ours).",
        default=16,
        minimum=0,
        maximum=10**6,
    )
    server: int | None = setting(
        "rank of the worker in the parameter server's role; without it, peer to peer.",
        default=None,
        minimum=0,
        maximum=10**6,
    )
    step: Literal["whole", "share"] = setting(
        "each gradient counts by the manifest's weighting, or is a whole step as published.",
        default="share",
    )


@dataclass(frozen=True, kw_only=True)
class AsyncParameters:
    """Of `async`."""

    compensation: float = setting(
        "lambda of the delay compensation; 0: none (0.04 in its paper, as recalled).",
        default=0.0,
        minimum=0,
        maximum=1000,
    )
    bound: int = setting(
        "iterations that a worker may be ahead of its slowest partner (ours).",
        default=16,
        minimum=0,
        maximum=10**6,
    )
    server: int | None = setting(
        "rank of the worker in the parameter server's role; without it, peer to peer.",
        default=None,
        minimum=0,
        maximum=10**6,
    )
    step: Literal["whole", "share"] = setting(
        "each gradient is a whole step, or counts by the manifest's weighting.", default="share"
    )


@dataclass(frozen=True, kw_only=True)
class AdpsgdParameters:
    """Of `adpsgd`."""

    graph: Literal["complete", "ring"] = setting(
        "workers at even places (by rank) form pairs with all at odd ones, or with those beside"
        " them (default ours).",
        default="complete",
    )
    overlap: bool = setting(
        "whether an active worker computes on while it awaits its neighbour's weights, or is held"
        " (default ours).",
        default=True,
    )


@dataclass(frozen=True, kw_only=True)
class D2Parameters:
    """Of `d2`."""

    mixing: Literal["complete", "ring"] = setting(
        "W gives everyone 1/n, or each worker and those beside it by rank (default ours).",
        default="complete",
    )
    self_weight: float = setting(
        "of a worker in its own row of W, on a ring (default ours).",
        default=0.5,
        above=1 / 3,
        maximum=1,
    )


@dataclass(frozen=True, kw_only=True)
class EventgradParameters:
    """Of `eventgrad`."""

    graph: Literal["complete", "ring"] = setting(
        "a worker's neighbours are all members, or those beside it by rank.", default="ring"
    )
    horizon: float = setting(
        "a variable's threshold is its norm's recent change per iteration, times this for each"
        " iteration that it is not sent; 0: it is sent always.",
        default=1.0,
        minimum=0,
        maximum=1000,
    )
    threshold: float | None = setting(
        "of every variable, in place of the adaptive one.", default=None, minimum=0, maximum=10**9
    )
    warmup_steps: int = setting(
        "steps before which everything is sent.",
        default=30,
        minimum=0,
        maximum=10**6,
    )
    most_silent_steps: int = setting(
        "a variable is sent after so many steps at the latest; 0: no bound (ours).",
        default=50,
        minimum=0,
        maximum=10**6,
    )
    bound: int = setting(
        "iterations that a worker may be ahead of the slowest; 0: lock step (default ours).",
        default=5,
        minimum=0,
        maximum=10**6,
    )


@dataclass(frozen=True, kw_only=True)
class GaiaParameters:
    """Of `gaia`."""

    threshold: float = setting(
        "S: an update is significant where it is above this share of the weight (as recalled).",
        default=0.01,
        minimum=0,
        maximum=1000,
    )
    decay: Literal["lr", "inv_sqrt", "none"] = setting(
        "the threshold follows the learning rate; is divided by the root of the steps done; stays.",
        default="lr",
    )
    clock_bound: int = setting(
        "iterations that a worker may be ahead of the slowest (default ours).",
        default=5,
        minimum=0,
        maximum=10**6,
        unit="iterations",
    )


@dataclass(frozen=True, kw_only=True)
class FedatParameters:
    """Of `fedat`."""

    server: int = setting(
        "rank of the worker in the server's role.", default=0, minimum=0, maximum=10**6
    )
    tiers: tuple[Annotated[int, Limits(minimum=1, maximum=10000)], ...] = setting(
        "tier of each worker by rank, 1 the fastest; without it, by the order of their answers.",
        default=(),
        max_items=10000,
    )
    tier_count: int = setting(
        "M, where the answers' order makes the tiers (default ours).",
        default=3,
        minimum=1,
        maximum=10000,
    )
    profile_rounds: int = setting(
        "first rounds, of all workers, whose answers' order counts (default ours).",
        default=2,
        minimum=1,
        maximum=1000,
    )
    local_steps: int = setting(
        "iterations between two answers of a worker (default ours).",
        default=10,
        minimum=1,
        maximum=10**6,
    )
    proximal: float = setting(
        "lambda, of the pull back to the global weights (as recalled).",
        default=0.4,
        minimum=0,
        maximum=1000,
    )
    decimals: int = setting(
        "of the weights that travel as polylines (as recalled).", default=4, minimum=0, maximum=9
    )


@dataclass(frozen=True, kw_only=True)
class HierarchicalParameters:
    """Of `hierarchical`."""

    inside_share: float = setting(
        "of a gradient's entries that travel inside a site, the largest (default ours).",
        default=1.0,
        above=0,
        maximum=1,
    )
    between_share: float = setting(
        "of the entries of a site's mean that travel between sites (default ours).",
        default=0.1,
        above=0,
        maximum=1,
    )
    combine: Literal["mean", "median", "trimmed"] = setting(
        "the sites' means become their mean by samples, or a robust one in which each site counts"
        " the same (default ours).",
        default="mean",
    )
    trim: int = setting(
        "of a trimmed mean: sites left out at either end, entry by entry (default ours).",
        default=1,
        minimum=0,
        maximum=10000,
    )
    group_size: int = setting(
        "workers of a site that exchange among themselves at most; 0: all of it (default ours).",
        default=0,
        minimum=0,
        maximum=10000,
    )


@dataclass(frozen=True, kw_only=True)
class HopParameters:
    """Of `hop`."""

    backup_workers: int = setting(
        "b: members whose weights need not be there (as recalled).",
        default=1,
        minimum=0,
        maximum=10000,
    )
    staleness: int = setting(
        "s: iterations that averaged weights may be old (as recalled).",
        default=5,
        minimum=0,
        maximum=100,
        unit="iterations",
    )
    max_gap: int = setting(
        "finished steps that a worker may be ahead of a member (default ours).",
        default=8,
        minimum=1,
        maximum=1000,
        unit="iterations",
    )
    skip_behind: int = setting(
        "steps behind every member at which a worker skips iterations; 0: never (default ours).",
        default=4,
        minimum=0,
        maximum=1000,
        unit="iterations",
    )


@dataclass(frozen=True, kw_only=True)
class DgcParameters:
    """For `dgc`."""

    share: float = setting(
        "of each variable's entries that are sent after the warm-up, at least one.",
        default=0.001,
        above=0,
        maximum=1,
    )
    warmup_stages: int = setting(
        "steps in which the share falls to that; 0: no warm-up.", default=4, minimum=0, maximum=100
    )
    warmup_every_steps: int = setting(
        "iterations of each stage (ours; an epoch as published).",
        default=50,
        minimum=1,
        maximum=10**6,
    )
    momentum: float = setting(
        "of the velocity; the optimizer is then to have none (as recalled).",
        default=0.9,
        minimum=0,
        below=1,
    )
    masking: bool = setting(
        "whether the velocity of what is sent starts again from 0.", default=True
    )
    clip_norm: float = setting(
        "norm to which gradients are clipped, over the root of the number of workers (default"
        " ours); 0: they are not.",
        default=0.0,
        minimum=0,
        maximum=10**9,
    )


@dataclass(frozen=True, kw_only=True)
class LocalsgdParameters:
    """For `localsgd`."""

    local_steps: int = setting(
        "H, iterations between two averages (default ours).",
        default=10,
        minimum=1,
        maximum=10**6,
    )
    outer_learning_rate: float = setting(
        "of the outer step; 1 with no momentum: the plain mean (DiLoCo's, as recalled).",
        default=0.7,
        above=0,
        maximum=10,
    )
    outer_momentum: float = setting(
        "of the outer step (default ours; 0.9 in DiLoCo, as recalled).",
        default=0.5,
        minimum=0,
        below=1,
    )
    nesterov: bool = setting("whether the outer momentum looks ahead.", default=True)


@dataclass(frozen=True, kw_only=True)
class TwostepParameters:
    """For `twostep`."""

    threshold: float = setting(
        "no entry is released below this magnitude; 0: the links alone decide (default ours).",
        default=0.0,
        minimum=0,
        maximum=10**9,
    )
    ratio: float = setting(
        "most time that a release may take (latency + bytes / bandwidth), per time computed since"
        " the last one (default ours).",
        default=1.0,
        above=0,
        maximum=1,
    )
    momentum: float = setting(
        "of the velocity; the optimizer is then to have none (default ours).",
        default=0.9,
        minimum=0,
        below=1,
    )
    combine_every_steps: int = setting(
        "iterations between two combinations of the sites' models; 0: none (ours).",
        default=0,
        minimum=0,
        maximum=10**6,
    )
    bound: int = setting(
        "iterations that a worker may be ahead of its slowest partner (ours).",
        default=16,
        minimum=0,
        maximum=10**6,
    )


@dataclass(frozen=True, kw_only=True)
class TopKParameters:
    """For `topk`."""

    share: float = setting(
        "of the entries that go on every link (default ours); 0: as many as each link's budget"
        " carries.",
        default=0.01,
        minimum=0,
        maximum=1,
    )
    residual: Literal["none", "shared", "perLink"] = setting(
        "what becomes of entries not sent: lost; kept, once for all links; kept for each link.",
        default="shared",
    )
