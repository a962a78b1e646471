"""Parameters of exchange policies in `spec.exchange.parameters`, declared as manifest fields.

Defines names, bounds and defaults, so that `dlion validate` needs no NumPy. Policies without
parameters are not listed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlion_api.document import setting


@dataclass(frozen=True, kw_only=True)
class NoParameters:
    """For policies without parameters."""


@dataclass(frozen=True, kw_only=True)
class AkoParameters:
    """Parameters of `ako`."""

    partitions: int = setting(
        "number of parts of a gradient (p); 0: the smallest number with parts that fit the"
        " narrowest link's budget.",
        default=0,
        minimum=0,
        maximum=10**6,
    )
    most_partitions: int = setting(
        "maximum of p if budgets determine it (ours).",
        default=100,
        minimum=1,
        maximum=10**6,
    )


@dataclass(frozen=True, kw_only=True)
class AdacompParameters:
    """Parameters of `adacomp`."""

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
        "rank of the worker in the parameter server's role; by default, peer to peer.",
        default=None,
        minimum=0,
        maximum=10**6,
    )
    step: Literal["whole", "share"] = setting(
        "each gradient is a full step as published (whole), or is weighted by the manifest's"
        " weighting (share).",
        default="share",
    )


@dataclass(frozen=True, kw_only=True)
class AsyncParameters:
    """Parameters of `async`."""

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
        "rank of the worker in the parameter server's role; by default, peer to peer.",
        default=None,
        minimum=0,
        maximum=10**6,
    )
    step: Literal["whole", "share"] = setting(
        "each gradient is a full step (whole), or is weighted by the manifest's weighting (share).",
        default="share",
    )


@dataclass(frozen=True, kw_only=True)
class HierarchicalParameters:
    """Parameters of `hierarchical`."""

    inside_share: float = setting(
        "share of a gradient's entries, the largest, sent inside a site (default ours).",
        default=1.0,
        above=0,
        maximum=1,
    )
    between_share: float = setting(
        "share of the entries of a site's mean sent between sites (default ours).",
        default=0.1,
        above=0,
        maximum=1,
    )
    combine: Literal["mean", "median", "trimmed"] = setting(
        "the sites' means are combined by their sample-weighted mean, or by a robust one with"
        " equal weights of sites (default ours).",
        default="mean",
    )
    trim: int = setting(
        "sites left out at either end of a trimmed mean, per entry (default ours).",
        default=1,
        minimum=0,
        maximum=10000,
    )
    group_size: int = setting(
        "maximum workers of a site that exchange directly; 0: all of it (default ours).",
        default=0,
        minimum=0,
        maximum=10000,
    )


@dataclass(frozen=True, kw_only=True)
class DgcParameters:
    """Parameters of `dgc`."""

    share: float = setting(
        "share of each variable's entries sent after the warm-up, at least one.",
        default=0.001,
        above=0,
        maximum=1,
    )
    warmup_stages: int = setting(
        "stages of the warm-up, in which the share decreases; 0: no warm-up.",
        default=4,
        minimum=0,
        maximum=100,
    )
    warmup_every_steps: int = setting(
        "iterations of each stage (ours; an epoch as published).",
        default=50,
        minimum=1,
        maximum=10**6,
    )
    momentum: float = setting(
        "momentum of the velocity; the optimizer must have none (as recalled).",
        default=0.9,
        minimum=0,
        below=1,
    )
    masking: bool = setting("whether the velocity of sent entries is reset to 0.", default=True)
    clip_norm: float = setting(
        "norm to which gradients are clipped, divided by the root of the number of workers"
        " (default ours); 0: no clipping.",
        default=0.0,
        minimum=0,
        maximum=10**9,
    )


@dataclass(frozen=True, kw_only=True)
class TwostepParameters:
    """Parameters of `twostep`."""

    threshold: float = setting(
        "minimum magnitude of a released entry; 0: only the links determine it (default ours).",
        default=0.0,
        minimum=0,
        maximum=10**9,
    )
    ratio: float = setting(
        "maximum time of a release (latency + bytes / bandwidth), relative to the time"
        " computed since the last one (default ours).",
        default=1.0,
        above=0,
        maximum=1,
    )
    momentum: float = setting(
        "momentum of the velocity; the optimizer must have none (default ours).",
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
    """Parameters of `topk`."""

    share: float = setting(
        "share of the entries sent on every link (default ours); 0: as many as each link's"
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
