"""The values that `factory` passes to every policy."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from dlion_api.bounds import MAX_WORKERS_PER_GROUP
from dlion_api.names import Rank
from dlion_api.spec import Spec
from dlion_core.codecs import Coding, IndexCodec, ValueCodec
from dlion_core.policies.claims.samples import max_batch_at
from dlion_core.policies.interface import Layout, ReplicaView
from dlion_core.topology.topology import CLUSTERED, graph_of


@dataclass(frozen=True)
class PolicyContext:
    """What a policy knows about the worker for which it is built."""

    spec: Spec
    rank: Rank
    ranks: tuple[Rank, ...]
    """Every worker that may ever take part, including this one; with `grows`, those known so far.
    """
    layout: Layout
    sites: Mapping[Rank, str] = field(default_factory=dict)
    """Site of each worker."""
    replica: ReplicaView | None = None
    """The weights, for policies that read them."""
    grows: bool = False
    """Whether workers may join that are unknown now."""
    secret: int = 0
    """Unknown to other workers. It seeds what they must not predict, and no update."""

    @property
    def graph(self) -> Mapping[Rank, frozenset[Rank]]:
        """Possible neighbours of each worker; those present at a time are members."""
        return graph_of(self.spec, self.ranks)

    @property
    def neighbours(self) -> frozenset[Rank]:
        """Neighbours of this worker; no other worker is ever a member."""
        return self.graph[self.rank]

    @property
    def possible_ranks(self) -> Collection[int]:
        """Every worker that may ever be named in a message."""
        if not self.grows:
            return frozenset(self.ranks)
        groups = sum(len(site.groups) for site in self.spec.sites)
        return range(MAX_WORKERS_PER_GROUP * groups)  # `dlion_api.spec.ranks`

    @property
    def exchanges_with_all(self) -> bool:
        is_clustered = self.spec.exchange.topology == CLUSTERED
        return not is_clustered and len(self.neighbours) == len(self.ranks) - 1

    def max_batch_at(self, iteration: int) -> int:
        """The largest local batch size that a peer may report for that iteration."""
        return max_batch_at(self.spec, iteration)

    @property
    def coding(self) -> Coding:
        """Encoding of payloads, by the manifest's `exchange`. Stochastic rounding is seeded by the
        job's seed and the worker's rank."""
        exchange = self.spec.exchange
        return Coding(
            ValueCodec(exchange.codec),
            IndexCodec(exchange.index_codec),
            exchange.codec_decimals,
            seed=(self.spec.trainer.seed << 32) + self.rank,
        )
