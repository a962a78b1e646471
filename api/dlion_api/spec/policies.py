"""`spec.batching`, `exchange`, `synchronization`, `knowledgeTransfer`: how workers learn together.

What each policy does stands in docs/exchange.md; a default that is the published system's as
recalled says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dlion_api.document import Rule, setting

MOST_BATCH = 10**6
GROWING_DATA_FRACTION = 0.5
"""`dataFraction` of a job that watches its data and says nothing of it."""
OPEN_POLICIES = frozenset({"ako", "dgc", "dlion", "dlion-published", "full", "none", "topk"})
"""Exchange policies whose workers need not know beforehand who may ever take part."""


@dataclass(frozen=True, kw_only=True)
class GlobalBatchSize:
    """The samples of all workers in one iteration, and how that number grows."""

    initial: int = setting(
        "at the start; it never falls below.",
        default=192,
        minimum=1,
        maximum=MOST_BATCH,
        unit="samples",
    )
    max: int = setting("never above.", default=5000, minimum=1, maximum=MOST_BATCH, unit="samples")
    growth: bool = setting("whether it grows at all.", default=True)
    every_steps: int = setting(
        "iterations between two adjustments.", default=50, minimum=1, maximum=10**6
    )
    increment: int = setting(
        "added at each adjustment of the warm-up; 0: the initial size (as recalled).",
        default=0,
        minimum=0,
        maximum=MOST_BATCH,
        unit="samples",
    )
    warmup_fraction: float = setting(
        "share of the training set at which the warm-up ends (as recalled).",
        default=0.01,
        minimum=0,
        maximum=1,
    )
    factor: float = setting(
        "multiplies the size at each adjustment after the warm-up (default ours).",
        default=1.5,
        above=1,
        maximum=10,
    )
    max_fraction: float = setting(
        "share of the training set at which growth ends (as recalled).",
        default=0.1,
        above=0,
        maximum=1,
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.initial <= self.max",
            message="initial must not be above max",
            holds=lambda it: it.initial <= it.max,
            reads=("initial", "max"),
        ),
        Rule(
            cel="self.warmupFraction <= self.maxFraction",
            message="warmupFraction must not be above maxFraction",
            holds=lambda it: it.warmup_fraction <= it.max_fraction,
            reads=("warmupFraction", "maxFraction"),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How the global batch is shared out among the workers."""

    policy: Literal["even", "goodput", "weighted"] = setting(
        "equal shares, or shares that follow each worker's measured samples per second; with"
        " goodput the global batch follows the measured gradient noise too (docs/exchange.md).",
        default="weighted",
    )
    data_fraction: float | None = setting(
        "part of the batch that is shared out by the workers' numbers of samples instead: data that"
        " come to a worker then raise its share. Where it is not given: 0.5 with dataset.watch,"
        " unless the policy is even; else 0.",
        default=None,
        minimum=0,
        maximum=1,
    )
    global_batch_size: GlobalBatchSize = setting(
        "the samples of all workers in one iteration.", default=GlobalBatchSize()
    )


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What travels between workers, and how it counts at the receiver."""

    policy: str = setting(
        "by name (docs/policies.md): dlion, dlion-published, full, none, a published system's, or"
        " one of an installed package.",
        default="dlion",
        pattern="[a-z]([-a-z0-9]*[a-z0-9])?",
        pattern_words="lower-case letters, digits and hyphens",
        max_length=63,
    )
    parameters: Mapping[str, Any] = setting(
        "what that policy takes, each with a default (docs/policies.md).", default={}
    )
    codec: Literal["float32", "float16", "bfloat16", "int8", "int4", "polyline"] = setting(
        "form of values on the wire; weights never go coarser than float16, but by polyline.",
        default="float16",
    )
    codec_decimals: int = setting(
        "decimals that polyline keeps (default as FedAT's, as recalled).",
        default=4,
        minimum=0,
        maximum=9,
    )
    index_codec: Literal["fast", "smallest"] = setting(
        "form of positions of the entries sent: the smallest in whole bytes, or the smallest of"
        " all (Golomb-Rice, varints), at more CPU.",
        default="fast",
    )
    weighting: Literal["sample_mean", "dlion_ratio"] = setting(
        "weight of a gradient: its samples over all samples, or (published form, as recalled) over"
        " the receiver's.",
        default="sample_mean",
    )
    topology: Literal["allToAll", "ring", "randomRegular", "bipartite", "clustered"] = setting(
        "who exchanges with whom (docs/topologies.md): all with all; each with the two beside it by"
        " rank; each with degree others by chance (trainer.seed); those at even ranks with those at"
        " odd ones; groups by measured links, each joined to the others by one gateway.",
        default="allToAll",
    )
    degree: int | None = setting(
        "with how many others a worker exchanges: for randomRegular, and for bipartite, where"
        " without it it is with all of the other side.",
        default=None,
        minimum=1,
        maximum=10000,
        unit="workers",
    )
    propagation: Literal["all", "selective"] = setting(
        "to which of them a gradient goes (selective: for dlion): in each step to all, or to a few;"
        " what the others have not had yet comes to them later, as one.",
        default="all",
    )
    propagation_peers: int = setting(
        "with selective, to how many in one step, unless more must be served within"
        " propagationWithin (default ours).",
        default=4,
        minimum=1,
        maximum=10000,
        unit="workers",
    )
    propagation_within: int = setting(
        "with selective, every one is served at least once in so many steps (default ours).",
        default=32,
        minimum=1,
        maximum=10000,
        unit="steps",
    )
    prioritization: bool = setting(
        "send the largest entries only (Max N); off: whole gradients.", default=True
    )
    floor_percent: float = setting(
        "Max N's N never falls below this, as long as the link's budget allows (as recalled).",
        default=0.85,
        minimum=0,
        maximum=100,
        unit="percent",
    )
    cpu_fraction: float = setting(
        "dlion sends what half of this part of the gradient's CPU pays for, where links carry more:"
        " what comes in costs about the other half. Links keep 64 KiB each (default ours).",
        default=0.2,
        above=0,
        maximum=100,
    )
    residual: Literal["none", "shared", "perLink"] = setting(
        "what becomes of entries that dlion does not send: lost; kept, once for all links; kept for"
        " each link (memory for a gradient each).",
        default="none",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.policy != 'dlion-published' || self.weighting == 'dlion_ratio'",
            message="policy dlion-published weights by dlion_ratio",
            holds=lambda it: it.policy != "dlion-published" or it.weighting == "dlion_ratio",
            reads=("weighting", "policy"),
            advice="Set weighting: dlion_ratio, or policy: dlion.",
        ),
        Rule(
            cel="self.policy == 'dlion' || self.residual == 'none'",
            message="residual is for policy dlion",
            holds=lambda it: it.policy == "dlion" or it.residual == "none",
            reads=("residual", "policy"),
            advice="Leave it out; policy topk takes parameters.residual.",
        ),
        Rule(
            cel="self.propagation != 'selective' || self.policy == 'dlion'",
            message="selective propagation is for policy dlion",
            holds=lambda it: it.propagation != "selective" or it.policy == "dlion",
            reads=("propagation", "policy"),
        ),
        Rule(
            cel="self.propagation != 'selective' || self.residual != 'shared'",
            message="selective propagation takes residual none or perLink",
            holds=lambda it: it.propagation != "selective" or it.residual != "shared",
            reads=("residual", "propagation"),
            advice="Peers are served at different times: there is no rest that all have in common.",
        ),
        Rule(
            cel="self.topology != 'randomRegular' || has(self.degree)",
            message="topology randomRegular needs a degree",
            holds=lambda it: it.topology != "randomRegular" or it.degree is not None,
            reads=("topology", "degree"),
            advice="Say with how many others each worker exchanges, for instance degree: 4.",
        ),
        Rule(
            cel="!has(self.degree) || self.topology in ['randomRegular', 'bipartite']",
            message="degree is for topologies randomRegular and bipartite",
            holds=lambda it: it.degree is None or it.topology in ("randomRegular", "bipartite"),
            reads=("degree", "topology"),
        ),
    )

    @property
    def takes_newcomers(self) -> bool:
        """Whether workers may take part of whom nobody knew when the run began."""
        return self.topology == "allToAll" and self.policy in OPEN_POLICIES


@dataclass(frozen=True, kw_only=True)
class Synchronization:
    """Whom a worker waits for before its next step."""

    mode: Literal["synchronous", "bounded", "backup", "asynchronous"] = setting(
        "for all; for those more than maxStaleness behind; for all but backupWorkers; for nobody.",
        default="bounded",
    )
    max_staleness: int = setting(
        "iterations that a peer may be behind, in mode bounded.",
        default=5,
        minimum=0,
        maximum=10000,
        unit="iterations",
    )
    backup_workers: int = setting(
        "peers that need not be heard, in mode backup.", default=0, minimum=0, maximum=10000
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.mode != 'backup' || self.backupWorkers >= 1",
            message="mode backup needs at least one backup worker",
            holds=lambda it: it.mode != "backup" or it.backup_workers >= 1,
            reads=("backupWorkers", "mode"),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class KnowledgeTransfer:
    """How weak replicas take over from the best one."""

    policy: Literal["none", "best2all", "best2worst"] = setting(
        "off; all others merge the best worker's weights; only the worst does.", default="best2all"
    )
    every_steps: int = setting(
        "iterations between comparisons (as recalled).", default=100, minimum=1, maximum=10**6
    )
    lambda_: float = setting(
        "share of the best worker's weights in the merge (as recalled).",
        default=0.75,
        minimum=0,
        maximum=1,
    )
    loss_window: int = setting(
        "recent losses whose mean is compared.", default=20, minimum=1, maximum=10000, unit="steps"
    )
