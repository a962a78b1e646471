"""What each exchange policy takes in `spec.exchange.parameters`, declared as manifests are.

Owns names, bounds and defaults, so that `dlion validate` needs no NumPy. A policy without
parameters has none here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlion_api.document import setting


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
