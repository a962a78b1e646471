"""Reads a manifest's policy sections and puts one worker's machine together.

Called once by the trainer, and by the simulator for each of its workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_worker.codecs import ValueCodec
from dlion_worker.policies.combining import Weighting
from dlion_worker.policies.knowledge_transfer import KnowledgeTransfer, TransferRule
from dlion_worker.policies.machine import WorkerMachine
from dlion_worker.policies.sending import Alone, MaxN, Sending, WholeGradient
from dlion_worker.policies.synchronization import Synchronizer, rule

if TYPE_CHECKING:
    from collections.abc import Collection

    from dlion_api.names import Rank
    from dlion_api.spec import Exchange, Spec
    from dlion_worker.policies.interface import Layout, Machine


def build(job_spec: Spec, rank: Rank, layout: Layout, ranks: Collection[Rank]) -> Machine:
    """The machine of worker `rank`. `ranks`: every worker that may ever take part.

    Policy `none` waits for nobody and takes over no weights, whatever the other sections say:
    nothing is exchanged.
    """
    exchange, knowledge = job_spec.exchange, job_spec.knowledge_transfer
    alone = exchange.policy == "none"
    synchronization = job_spec.synchronization
    sizes = job_spec.batching.global_batch_size
    return WorkerMachine(
        rank=rank,
        ranks=ranks,
        size=layout.size,
        most_samples=max(sizes.initial, sizes.max),
        sending=_sending(exchange, layout),
        weighting=Weighting(exchange.weighting),
        synchronizer=Synchronizer(
            rule(
                "asynchronous" if alone else synchronization.mode,
                max_staleness=synchronization.max_staleness,
                backup_workers=synchronization.backup_workers,
            )
        ),
        transfer=KnowledgeTransfer(
            TransferRule(
                policy="none" if alone else knowledge.policy,
                every_steps=knowledge.every_steps,
                fraction=knowledge.lambda_,
                loss_window=knowledge.loss_window,
            ),
            rank=rank,
            size=layout.size,
        ),
    )


def _sending(exchange: Exchange, layout: Layout) -> Sending:
    codec = ValueCodec(exchange.codec)
    match exchange.policy:
        case "none":
            return Alone()
        case "full":
            return WholeGradient(codec)
        case "dlion" | "dlion-published":
            if exchange.prioritization:
                return MaxN(layout, codec, exchange.floor_percent)
            return WholeGradient(codec)
