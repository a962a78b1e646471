"""From a manifest's policy sections to one worker's machine.

Called once by the trainer, and by the simulator for each of its workers. Which class it becomes
is the catalogue's; `gradient_machine` puts together what most policies have in common.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from dlion_api.spec.bounds import MOST_WORKERS
from dlion_worker.codecs import Coding, IndexCodec, ValueCodec
from dlion_worker.policies.catalogue import find, origin_of, parameters_of
from dlion_worker.policies.combining import Weighting
from dlion_worker.policies.folding import HELD, FoldingMachine
from dlion_worker.policies.guarded import behind_border, built
from dlion_worker.policies.horizon import Horizon
from dlion_worker.policies.interface import Layout, ReplicaView
from dlion_worker.policies.knowledge_transfer import KnowledgeTransfer, TransferRule
from dlion_worker.policies.machine import WorkerMachine
from dlion_worker.policies.synchronization import Synchronizer, rule
from dlion_worker.policies.topology import CLUSTERED, graph_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dlion_api.names import Rank
    from dlion_api.spec import Job, Spec
    from dlion_worker.policies.interface import Machine
    from dlion_worker.policies.sending import Sending


FOLD_ITERATIONS = 10
"""What a peer has trained on meanwhile moves no weights where it is less than that many iterations
of all: a link that was down for a moment. What was missed then is as a gradient that gave way."""


class ReplicaModel(ReplicaView, Protocol):
    """Weights with their layout."""

    @property
    def layout(self) -> Layout:
        """Of the weights."""
        ...


@dataclass(frozen=True)
class Context:
    """What a policy is told of the worker that it is made for."""

    spec: Spec
    rank: Rank
    ranks: tuple[Rank, ...]
    """Every worker that may ever take part, this one included; with `grows`, those known so far."""
    layout: Layout
    sites: Mapping[Rank, str] = field(default_factory=dict)
    """Which site each worker is of."""
    replica: ReplicaView | None = None
    """The weights, for policies that read them."""
    grows: bool = False
    """Whether others may come, of whom nothing is known yet."""

    @property
    def graph(self) -> Mapping[Rank, frozenset[Rank]]:
        """With whom each worker exchanges; whoever of them is there just now is a member."""
        return graph_of(self.spec, self.ranks)

    @property
    def neighbours(self) -> frozenset[Rank]:
        """With whom this worker exchanges: nobody else ever is a member."""
        return self.graph[self.rank]

    @property
    def hears_all(self) -> bool:
        """Whether this worker exchanges with every other one."""
        is_clustered = self.spec.exchange.topology == CLUSTERED
        return not is_clustered and len(self.neighbours) == len(self.ranks) - 1

    @property
    def most_samples(self) -> int:
        """The largest local batch that a peer may claim."""
        sizes = self.spec.batching.global_batch_size
        return max(sizes.initial, sizes.max)

    @property
    def coding(self) -> Coding:
        """How payloads are written, by the manifest's `exchange`. Chance in rounding follows the
        job's seed and the worker's rank."""
        exchange = self.spec.exchange
        return Coding(
            ValueCodec(exchange.codec),
            IndexCodec(exchange.index_codec),
            exchange.codec_decimals,
            seed=(self.spec.trainer.seed << 32) + self.rank,
        )

    def synchronizer(self, mode: str | None = None) -> Synchronizer:
        """Who is waited for, by the manifest's `synchronization` or in that mode."""
        synchronization = self.spec.synchronization
        return Synchronizer(
            rule(
                mode or synchronization.mode,
                max_staleness=synchronization.max_staleness,
                backup_workers=synchronization.backup_workers,
            )
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
) -> Horizon:
    """The machine of worker `rank`. `ranks`: every worker that may ever take part; `grows`: and
    others.

    Raises: SpecError for a policy that is not known here, or parameters that it does not take;
        ProgramError where the code of an installed one fails.
    """
    context = Context(job_spec, rank, tuple(sorted(ranks)), layout, sites or {}, replica, grows)
    parameters = parameters_of(job_spec, ranks=context.ranks)
    policy, origin = find(job_spec.exchange.policy), origin_of(job_spec.exchange.policy)
    if origin is None:
        make = partial(policy.builder(), context, parameters)
    else:
        make = partial(built, origin, policy.builder, context, parameters)
    return Horizon(make, policy.lasting, held=HELD)


def build_for(job: Job, rank: Rank, replica: ReplicaModel) -> Horizon:
    """The machine of a job's worker, over that replica."""
    workers = {job.worker(rank), *job.workers()}
    sites = {worker.rank: worker.site for worker in workers}
    return build(
        job.spec, rank, replica.layout, sites, sites=sites, replica=replica, grows=job.may_grow
    )


def gradient_machine(context: Context, sending: Sending) -> Machine:
    """A machine that exchanges gradients, chosen and coded by `sending`.

    Where nothing is combined it waits for nobody and takes over no weights, whatever the other
    sections say. Where all exchange with all it folds together with those it was cut off from.
    """
    sending = behind_border(origin_of(context.spec.exchange.policy), sending)
    machine = _worker_machine(context, sending)
    others = frozenset(context.ranks) - {context.rank}
    if not sending.combines or context.replica is None or context.neighbours != others:
        return machine
    return FoldingMachine(
        machine,
        context.replica,
        rank=context.rank,
        ranks=range(_most_ranks(context.spec)) if context.grows else frozenset(context.ranks),
        size=context.layout.size,
        coding=context.coding,
        least_samples=FOLD_ITERATIONS * context.spec.batching.global_batch_size.initial,
        slack=context.synchronizer().rule.slack,
        folding=machine.fold,
    )


def _most_ranks(spec: Spec) -> int:
    """Of a job whose groups may grow, by `dlion_api.spec.ranks`."""
    return MOST_WORKERS * sum(len(site.groups) for site in spec.sites)


def _worker_machine(context: Context, sending: Sending) -> WorkerMachine:
    knowledge = context.spec.knowledge_transfer
    alone = not sending.combines
    synchronizer = context.synchronizer("asynchronous" if alone else None)
    return WorkerMachine(
        rank=context.rank,
        ranks=(context.rank, *context.neighbours),
        grows=context.grows,
        size=context.layout.size,
        most_samples=context.most_samples,
        hears_all=context.hears_all,
        sending=sending,
        weighting=Weighting(context.spec.exchange.weighting),
        synchronizer=synchronizer,
        transfer=KnowledgeTransfer(
            TransferRule(
                policy="none" if alone else knowledge.policy,
                every_steps=knowledge.every_steps,
                fraction=knowledge.lambda_,
                loss_window=knowledge.loss_window,
            ),
            rank=context.rank,
            size=context.layout.size,
            replica=context.replica,
            in_lock_step=synchronizer.rule.barrier,
            coding=context.coding,
        ),
    )
