"""Build one worker's machine from the manifest's policy sections.

Called once by the trainer, and by the simulator for each worker. The catalogue selects the class;
`gradient_machine` assembles what most policies share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from dlion_core.codecs import Coding, IndexCodec, ValueCodec
from dlion_core.policies.catalogue import find, parameters_of, plugin_of
from dlion_core.policies.gradient.gradient_exchange import GradientMachine
from dlion_core.policies.interface import ReplicaView
from dlion_core.policies.iteration_guard import IterationGuard
from dlion_core.policies.partitions.partition_merge import PartitionMerge
from dlion_core.policies.partitions.version_vector import VERSION_VECTOR_STATE
from dlion_core.policies.plugin_guards import build_guarded, guard_selector
from dlion_core.topology.topology import CLUSTERED, graph_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from dlion_api.names import Rank
    from dlion_api.spec import Job, Spec
    from dlion_core.policies.gradient.gradient_selectors import GradientSelector
    from dlion_core.policies.interface import Layout, PolicyMachine


MERGE_ITERATIONS = 10
"""A returned peer's samples cause a merge only above this many iterations of all workers. Below,
the link was down for a moment, and the loss is like that of a superseded gradient."""


class ReplicaModel(ReplicaView, Protocol):
    """Weights with their layout."""

    @property
    def layout(self) -> Layout:
        """Layout of the weights."""
        ...


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

    @property
    def graph(self) -> Mapping[Rank, frozenset[Rank]]:
        """Possible neighbours of each worker; those present at a time are members."""
        return graph_of(self.spec, self.ranks)

    @property
    def neighbours(self) -> frozenset[Rank]:
        """Neighbours of this worker; no other worker is ever a member."""
        return self.graph[self.rank]

    @property
    def exchanges_with_all(self) -> bool:
        is_clustered = self.spec.exchange.topology == CLUSTERED
        return not is_clustered and len(self.neighbours) == len(self.ranks) - 1

    @property
    def max_samples(self) -> int:
        """The largest local batch size that a peer may report."""
        sizes = self.spec.batching.global_batch_size
        return max(sizes.initial, sizes.max)

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


def build(
    job_spec: Spec,
    rank: Rank,
    layout: Layout,
    ranks: Collection[Rank],
    *,
    sites: Mapping[Rank, str] | None = None,
    replica: ReplicaView | None = None,
    grows: bool = False,
) -> IterationGuard:
    """Return the machine of worker `rank`.

    `ranks`: every worker that may ever take part. With `grows`, others may join. Raises the errors
    of `parameters_of`.
    """
    context = PolicyContext(
        job_spec, rank, tuple(sorted(ranks)), layout, sites or {}, replica, grows
    )
    parameters = parameters_of(job_spec, ranks=context.ranks)
    policy, origin = find(job_spec.exchange.policy), plugin_of(job_spec.exchange.policy)
    if origin is None:
        make = partial(policy.builder(), context, parameters)
    else:
        make = partial(build_guarded, origin, policy.builder, context, parameters)
    return IterationGuard(make, policy.lasting, held=VERSION_VECTOR_STATE)


def build_for(job: Job, rank: Rank, replica: ReplicaModel) -> IterationGuard:
    """Return the machine of a job's worker, for that replica."""
    workers = {job.worker(rank), *job.workers()}
    sites = {worker.rank: worker.site for worker in workers}
    return build(
        job.spec, rank, replica.layout, sites, sites=sites, replica=replica, grows=job.may_grow
    )


def gradient_machine(
    context: PolicyContext,
    selector: GradientSelector,
    build_machine: Callable[[PolicyContext, GradientSelector], GradientMachine] = GradientMachine,
) -> PolicyMachine:
    """Return a machine that exchanges the gradient parts that `selector` selects.

    If all workers exchange with all and gradients are combined, it merges partitions.
    """
    selector = guard_selector(plugin_of(context.spec.exchange.policy), selector)
    machine = build_machine(context, selector)
    others = frozenset(context.ranks) - {context.rank}
    if not selector.combines or context.replica is None or context.neighbours != others:
        return machine
    return PartitionMerge(
        machine,
        context,
        context.replica,
        min_samples=MERGE_ITERATIONS * context.spec.batching.global_batch_size.initial,
        slack=machine.synchronizer.rule.slack,
        on_merging=machine.set_merging,
    )
