"""Parameters of policies that exchange weights or updates; see `parameters`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from dlion_api.document import Limits, setting


@dataclass(frozen=True, kw_only=True)
class AdpsgdParameters:
    """Parameters of `adpsgd`."""

    graph: Literal["complete", "ring"] = setting(
        "whether workers at even positions (by rank) pair with all at odd ones, or with ring"
        " neighbours (default ours).",
        default="complete",
    )
    overlap: bool = setting(
        "whether an active worker continues to compute while it waits for weights (default ours).",
        default=True,
    )


@dataclass(frozen=True, kw_only=True)
class D2Parameters:
    """Parameters of `d2`."""

    mixing: Literal["complete", "ring"] = setting(
        "W gives each worker 1/n, or only itself and its ring neighbours (default ours).",
        default="complete",
    )
    self_weight: float = setting(
        "weight of a worker in its own row of W, on a ring (default ours).",
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
    horizon: float = setting(
        "factor of the threshold per iteration without sending; the threshold starts as the"
        " norm's recent change per iteration; 0: send always.",
        default=1.0,
        minimum=0,
        maximum=1000,
    )
    threshold: float | None = setting(
        "fixed threshold of every variable, instead of the adaptive one.",
        default=None,
        minimum=0,
        maximum=10**9,
    )
    warmup_steps: int = setting(
        "steps before which everything is sent.",
        default=30,
        minimum=0,
        maximum=10**6,
    )
    most_silent_steps: int = setting(
        "maximum steps without sending a variable; 0: no limit (ours).",
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
    """Parameters of `gaia`."""

    threshold: float = setting(
        "S: an update is significant above this share of the weight (as recalled).",
        default=0.01,
        minimum=0,
        maximum=1000,
    )
    decay: Literal["lr", "inv_sqrt", "none"] = setting(
        "the threshold follows the learning rate (lr), is divided by the root of the steps"
        " (inv_sqrt), or is constant (none).",
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
    """Parameters of `fedat`."""

    server: int = setting(
        "rank of the worker in the server's role.", default=0, minimum=0, maximum=10**6
    )
    tiers: tuple[Annotated[int, Limits(minimum=1, maximum=10000)], ...] = setting(
        "tier of each worker by rank, 1 is the fastest; by default, by the order of their answers.",
        default=(),
        max_items=10000,
    )
    tier_count: int = setting(
        "M, the number of tiers if the order of answers defines them (default ours).",
        default=3,
        minimum=1,
        maximum=10000,
    )
    profile_rounds: int = setting(
        "number of first rounds, of all workers, that define the order of answers (default ours).",
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
        "lambda, weight of the proximal term towards the global weights (as recalled).",
        default=0.4,
        minimum=0,
        maximum=1000,
    )
    decimals: int = setting(
        "decimals of weights sent as polylines (as recalled).", default=4, minimum=0, maximum=9
    )


@dataclass(frozen=True, kw_only=True)
class HopParameters:
    """Parameters of `hop`."""

    backup_workers: int = setting(
        "b: members that may be missing from an average (as recalled).",
        default=1,
        minimum=0,
        maximum=10000,
    )
    staleness: int = setting(
        "s: maximum age of averaged weights in iterations (as recalled).",
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
class LocalsgdParameters:
    """Parameters of `localsgd`."""

    local_steps: int = setting(
        "H, iterations between two averages (default ours).",
        default=10,
        minimum=1,
        maximum=10**6,
    )
    outer_learning_rate: float = setting(
        "learning rate of the outer step; 1 without momentum: the plain mean (DiLoCo's, as"
        " recalled).",
        default=0.7,
        above=0,
        maximum=10,
    )
    outer_momentum: float = setting(
        "momentum of the outer step (default ours; 0.9 in DiLoCo, as recalled).",
        default=0.5,
        minimum=0,
        below=1,
    )
    nesterov: bool = setting("whether the outer momentum is Nesterov's.", default=True)
