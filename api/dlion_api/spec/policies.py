"""`spec.batching`, `exchange`, `synchronization`, `knowledgeTransfer`: how workers cooperate.

docs/exchange.md describes each policy. A default is marked "as recalled" if it is the published
system's from memory.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dlion_api.document import Rule, optional, setting
from dlion_api.names import Rank

DECODER = Rank(0)
"""The only worker that trains under topology staged."""
MAX_BATCH_SIZE = 10**6
GROWING_DATA_FRACTION = 0.5
"""Default of `dataFraction` for a job that watches its data."""
GROWING_BATCH_POLICIES = frozenset({"dlion", "dlion-published"})
"""Exchange policies whose global batch grows by default."""
OPEN_POLICIES = frozenset(
    {"adaptive", "ako", "demo", "dgc", "dlion", "dlion-published", "full", "none", "topk"}
)
"""Exchange policies whose workers need not know all possible peers in advance."""


@dataclass(frozen=True, kw_only=True)
class GlobalBatchSize:
    """The samples of all workers in one iteration, and how that number grows."""

    initial: int = setting(
        "size at the start, and the minimum.",
        default=192,
        minimum=1,
        maximum=MAX_BATCH_SIZE,
        unit="samples",
    )
    max: int = setting(
        "the maximum.", default=5000, minimum=1, maximum=MAX_BATCH_SIZE, unit="samples"
    )
    growth: bool | None = optional(
        "whether the size changes. Default: true with policies dlion and dlion-published, and"
        " batching policy goodput."
    )
    every_steps: int = setting(
        "iterations between two adjustments.", default=50, minimum=1, maximum=10**6
    )
    increment: int = setting(
        "samples added at each adjustment of the warm-up; 0: the initial size (as recalled).",
        default=0,
        minimum=0,
        maximum=MAX_BATCH_SIZE,
        unit="samples",
    )
    warmup_fraction: float = setting(
        "size at which the warm-up ends, as a share of the training set (as recalled).",
        default=0.01,
        minimum=0,
        maximum=1,
    )
    factor: float = setting(
        "factor of the size at each adjustment after the warm-up (our default).",
        default=1.5,
        above=1,
        maximum=10,
    )
    max_fraction: float = setting(
        "size at which growth ends, as a share of the training set (as recalled).",
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

    def within(self, size: int) -> int:
        """The nearest size that this manifest allows."""
        return max(self.initial, min(size, self.max))

    def grown(self, size: int, training_set_samples: int) -> int:
        """The size after one more adjustment; the same size at the end of growth."""
        warm = min(self.warmup_fraction, self.max_fraction) * training_set_samples
        if size < math.floor(warm):
            wanted, bound = size + (self.increment or self.initial), warm
        else:
            wanted = math.ceil(size * self.factor)
            bound = self.max_fraction * training_set_samples
        return max(size, min(wanted, math.floor(min(bound, self.max))))


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How the global batch is divided among the workers."""

    policy: Literal["even", "goodput", "weighted"] = setting(
        "equal shares, or by measured samples per second; with goodput the global batch follows"
        " the gradient noise too (docs/exchange.md).",
        default="weighted",
    )
    data_fraction: float | None = optional(
        "part of the batch divided by numbers of samples instead. Default: 0.5 with"
        " dataset.watch, unless policy is even; else 0.",
        minimum=0,
        maximum=1,
    )
    global_batch_size: GlobalBatchSize = setting(
        "the samples of all workers in one iteration.", default=GlobalBatchSize()
    )


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What workers exchange, and how a receiver weights it."""

    policy: str = setting(
        "by name (docs/policies.md): adaptive, dlion, dlion-published, full, none, a published"
        " system's, or one of an installed package.",
        default="adaptive",
        pattern="[a-z]([-a-z0-9]*[a-z0-9])?",
        pattern_description="lower-case letters, digits and hyphens",
        max_length=63,
    )
    parameters: Mapping[str, Any] = setting(
        "parameters of that policy (docs/policies.md).", default={}
    )
    codec: Literal["float32", "float16", "bfloat16", "int8", "int4", "int2", "polyline"] = setting(
        "encoding of values; weights use at least float16, except with polyline.",
        default="float16",
    )
    codec_decimals: int = setting(
        "decimals that polyline keeps (default as FedAT's, as recalled).",
        default=4,
        minimum=0,
        maximum=9,
    )
    index_codec: Literal["fast", "smallest"] = setting(
        "encoding of indices: the smallest that uses whole bytes, or the smallest of all"
        " (Golomb-Rice, varints), which needs more CPU.",
        default="fast",
    )
    weighting: Literal["sample_mean", "dlion_ratio"] = setting(
        "weight of a peer's gradient: its samples over those of all workers, or (published form,"
        " as recalled) over the receiver's.",
        default="sample_mean",
    )
    topology: Literal["allToAll", "ring", "randomRegular", "bipartite", "clustered", "staged"] = (
        setting(
            "which workers exchange (docs/topologies.md): all with all; two neighbours by rank;"
            " degree random others (trainer.seed); even with odd ranks; groups by measured links,"
            " connected by gateways; the first with all others (docs/staged.md).",
            default="allToAll",
        )
    )
    grouping: Literal["links", "learned"] = setting(
        "rates by which clustered makes groups (docs/clustering.md): measured ones, or predicted"
        " ones, for workers that move.",
        default="links",
    )
    degree: int | None = optional(
        "peers of a worker, for randomRegular and bipartite; default for bipartite: all of the"
        " other side.",
        minimum=1,
        maximum=10000,
        unit="workers",
    )
    propagation: Literal["all", "selective"] = setting(
        "send each gradient to all peers, or (selective, for dlion) to a few peers in each step;"
        " the others get the sum of missed gradients later.",
        default="all",
    )
    propagation_peers: int = setting(
        "with selective, peers in one step, unless propagationWithin requires more (our default).",
        default=4,
        minimum=1,
        maximum=10000,
        unit="workers",
    )
    propagation_within: int = setting(
        "with selective, each peer is served within this many steps (our default).",
        default=32,
        minimum=1,
        maximum=10000,
        unit="steps",
    )
    prioritization: bool = setting(
        "send the largest entries only (Max N); off: whole gradients.", default=True
    )
    floor_percent: float = setting(
        "minimum of N in Max N, if the link's budget allows it (as recalled).",
        default=0.85,
        minimum=0,
        maximum=100,
        unit="percent",
    )
    cpu_fraction: float = setting(
        "maximum CPU time of dlion's exchange, relative to that of computing gradients (our"
        " default). Sending may use half of it, but each link may always send 64 KiB.",
        default=0.2,
        above=0,
        maximum=100,
    )
    residual: Literal["none", "shared", "perLink"] = setting(
        "entries that dlion does not send are lost (none), or added to later gradients: in one sum"
        " for all links (shared), or in a sum for each link, which needs memory for one gradient"
        " (perLink).",
        default="none",
    )

    quarantine: Literal["off", "majority"] = setting(
        "shut out a worker that most of the others, and at least two, have named by"
        " `UnusualValues`; on clusters, most at a site (docs/revocation.md).",
        default="off",
    )
    robustness: Literal["off", "detect", "clip", "trimmed", "krum"] = setting(
        "against plausible, wrong contributions (docs/robustness.md): nothing; a warning that"
        " names the worker; also a bound of norms; a mean without extreme values; or only those"
        " nearest to each other.",
        default="detect",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.policy != 'adaptive' || self.topology == 'allToAll'",
            message="policy adaptive needs topology allToAll",
            holds=lambda it: it.policy != "adaptive" or it.topology == "allToAll",
            reads=("topology", "policy"),
            advice="Set a policy that works on this topology, such as policy: dlion.",
        ),
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
            advice="Set policy: dlion, or leave it out; policy topk takes parameters.residual.",
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
            advice="Peers are served at different times, so they have no common residual.",
        ),
        Rule(
            cel="self.topology != 'randomRegular' || has(self.degree)",
            message="topology randomRegular needs a degree",
            holds=lambda it: it.topology != "randomRegular" or it.degree is not None,
            reads=("topology", "degree"),
            advice="Set the number of peers of each worker, for instance degree: 4.",
        ),
        Rule(
            cel="!has(self.degree) || self.topology in ['randomRegular', 'bipartite']",
            message="degree is for topologies randomRegular and bipartite",
            holds=lambda it: it.degree is None or it.topology in ("randomRegular", "bipartite"),
            reads=("degree", "topology"),
        ),
        Rule(
            cel="self.grouping != 'learned' || self.topology == 'clustered'",
            message="grouping learned is for topology clustered",
            holds=lambda it: it.grouping != "learned" or it.topology == "clustered",
            reads=("grouping", "topology"),
            advice="Set topology: clustered, or leave grouping out.",
        ),
    )

    def trains(self, rank: int) -> bool:
        """Whether that worker trains. Under topology staged the others send features to it."""
        return self.topology != "staged" or rank == DECODER

    def lacks_trainer(self, lost: Collection[int]) -> str:
        """Why a run without these workers is over: none of the others trains. Empty: some do, as
        far as the topology is concerned."""
        if self.topology != "staged" or DECODER not in lost:
            return ""
        return "no other worker trains (topology staged)"

    @property
    def allows_new_workers(self) -> bool:
        """Whether workers may join that were unknown when the run began."""
        return self.topology == "allToAll" and self.policy in OPEN_POLICIES


@dataclass(frozen=True, kw_only=True)
class Synchronization:
    """Which peers a worker waits for before its next step."""

    mode: Literal["synchronous", "bounded", "backup", "asynchronous"] = setting(
        "a worker waits for all peers (our default); for those more than maxStaleness behind; for"
        " all but backupWorkers; or for none.",
        default="synchronous",
    )
    max_staleness: int = setting(
        "iterations by which a peer may be behind, in mode bounded.",
        default=5,
        minimum=0,
        maximum=10000,
        unit="iterations",
    )
    backup_workers: int = setting(
        "peers that need not be waited for, in mode backup.", default=0, minimum=0, maximum=10000
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
    """How replicas with a higher loss take over weights of the best one."""

    policy: Literal["none", "best2all", "best2worst"] = setting(
        "no worker takes weights; all others merge the best worker's; or only the worst worker"
        " does.",
        default="best2all",
    )
    every_steps: int = setting(
        "iterations between comparisons (as recalled).", default=100, minimum=1, maximum=10**6
    )
    lambda_: float = setting(
        "share of the best worker's weights (as recalled).",
        default=0.75,
        minimum=0,
        maximum=1,
    )
    loss_window: int = setting(
        "recent losses of a worker whose mean is compared.",
        default=20,
        minimum=1,
        maximum=10000,
        unit="steps",
    )
