"""What policies take that exchange weights or updates of them; as in `parameters`.

Imported by `catalogue` alone and by the policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from dlion_api.document import Limits, setting


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
