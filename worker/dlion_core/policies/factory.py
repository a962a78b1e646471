"""Build one worker's machine from the manifest's policy sections, and bound its messages.

Called once by the trainer, and by the simulator for each worker. The catalogue selects the class;
`gradient_machine` assembles what most policies share.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Protocol

from dlion_api.names import Rank
from dlion_api.spec import Job, Spec
from dlion_core.codecs import max_coded_bytes
from dlion_core.policies.catalogue import find, parameters_of, plugin_of
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.gradient.gradient_exchange import GradientMachine
from dlion_core.policies.gradient.gradient_selectors import GradientSelector
from dlion_core.policies.interface import Layout, PolicyMachine, ReplicaView
from dlion_core.policies.iteration_guard import IterationGuard
from dlion_core.policies.knowledge_transfer import FIRST_LOSS_STATE
from dlion_core.policies.partitions.partition_merge import PartitionMerge
from dlion_core.policies.partitions.version_vector import (
    MERGE_ITERATIONS,
    VERSION_VECTOR_STATE,
)
from dlion_core.policies.plugin_guards import GuardedSelector, build_guarded
from dlion_core.policies.staged.feature_batch import MAX_BATCH_BYTES
from dlion_core.topology.topology import STAGED

MAX_OVERHEAD_BYTES = 64 * 1024
"""Maximum bytes besides a model's values: a version vector (12 bytes for each of five thousand
workers) and a bit per variable (`eventgrad`, counted separately)."""


class ReplicaModel(ReplicaView, Protocol):
    """Weights with their layout."""

    @property
    def layout(self) -> Layout:
        """Layout of the weights."""


def build(
    job_spec: Spec,
    rank: Rank,
    layout: Layout,
    ranks: Collection[Rank],
    *,
    sites: Mapping[Rank, str] | None = None,
    replica: ReplicaView | None = None,
    grows: bool = False,
    secret: int = 0,
) -> IterationGuard:
    """Return the machine of worker `rank`. `ranks`: every worker that may ever take part. With
    `grows`, others may join. `secret`: unknown to them. Raises the errors of `parameters_of`."""
    context = PolicyContext(
        job_spec, rank, tuple(sorted(ranks)), layout, sites or {}, replica, grows, secret
    )
    parameters = parameters_of(job_spec, ranks=context.ranks)
    policy, origin = find(job_spec.exchange.policy), plugin_of(job_spec.exchange.policy)
    if origin is None:
        make = partial(policy.builder(), context, parameters)
    else:
        make = partial(build_guarded, origin, policy.builder, context, parameters)
    return IterationGuard(make, (*policy.lasting, FIRST_LOSS_STATE), held=VERSION_VECTOR_STATE)


def build_for(job: Job, rank: Rank, replica: ReplicaModel, secret: int) -> IterationGuard:
    """Return the machine of one of the job's workers, as `build` does."""
    workers = {job.worker(rank), *job.workers()}
    sites = {worker.rank: worker.site for worker in workers}
    return build(
        job.spec, rank, replica.layout, sites,
        sites=sites, replica=replica, grows=job.may_grow, secret=secret,
    )  # fmt: skip


def gradient_machine(
    context: PolicyContext,
    selector: GradientSelector,
    build_machine: Callable[[PolicyContext, GradientSelector], GradientMachine] = GradientMachine,
) -> PolicyMachine:
    """Return a machine that exchanges the gradient parts that `selector` selects. If all workers
    exchange with all and gradients are combined, it merges partitions."""
    if (origin := plugin_of(context.spec.exchange.policy)) is not None:
        selector = GuardedSelector(origin, selector)
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


def max_message_bytes(job: Job, layout: Layout) -> int:
    """Return the longest payload of a gradient or weights message for that model. At most the
    manifest's `network.maxMessageBytes`. A receiver reserves space for it."""
    bitmap_bytes = (len(layout.sizes) + 7) // 8
    most = max_coded_bytes(layout.size) + bitmap_bytes + MAX_OVERHEAD_BYTES
    if job.spec.exchange.topology == STAGED:
        most = max(most, MAX_BATCH_BYTES)
    return min(most, job.spec.network.max_message_bytes)
