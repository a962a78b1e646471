"""Ends a virtual run: evaluates the replicas and saves one model per site.

`trainer.shutdown` decides which model is kept, and how.
"""

from collections.abc import Mapping
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

import numpy as np

from dlion_api.errors import UnavailableError
from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_core.lifecycle.reporting import EvaluatedSnapshot
from dlion_results.run_folder.storage import writing
from dlion_simulator.worker import VirtualWorker
from dlion_worker.training.evaluation import Evaluator
from dlion_worker.training.site_model import (
    CollectedReplica,
    choose_model,
    save_site_model,
    site_leads,
)
from dlion_worker.training.snapshot import TrainingState


def save_final_models(
    job: Job,
    workers: Mapping[Rank, VirtualWorker],
    evaluator: Evaluator,
    executor: Executor,
    *,
    ended_s: float,
    stop_reason: str,
    results_dir: Path,
) -> None:
    """Evaluate the replicas of the workers present at the end, and save a model per site. Raises
    UnavailableError if no worker is present, and StorageError."""
    if not workers:
        raise UnavailableError(f"{stop_reason}, and no worker was there to keep a model")
    first_replica = next(iter(workers.values())).parts.replica
    replicas, known = [], {}
    finals = executor.map(partial(_evaluate, evaluator, ended_s), workers.values())
    for (rank, worker), final in zip(workers.items(), finals, strict=True):
        progress, model = worker.progress, worker.parts.replica.model
        if job.spec.exchange.trains(rank):
            worker.parts.reporter.evaluation(final, final=True)
        # Training is over: weights need no copy, and optimizer state is not needed.
        own = TrainingState(model.weights_D, model.get_state(), np.zeros(0, np.float32))
        replicas.append(CollectedReplica(rank, own, progress.own_samples, progress.iteration))
        known[id(own)] = final.evaluation.accuracy

    def accuracy_of(state: TrainingState) -> float:
        if id(state) in known:
            return known[id(state)]
        snapshot = first_replica.snapshot_of(state)
        return evaluator.evaluate_all(None, snapshot=snapshot).evaluation.accuracy

    try:
        about, state = choose_model(job, replicas, accuracy_of=accuracy_of, stop_reason=stop_reason)
    except UnavailableError as error:
        reporter = next(iter(workers.values())).parts.reporter
        reporter.event(EventReason.REPLICA_MISSING, str(error), warning=True)
        return
    sites = {worker.rank: worker.site for worker in job.workers()}
    for rank in sorted(site_leads(job, set(workers)), key=lambda r: sites[r]):
        site = sites[rank]
        with writing("cannot save the model", results_dir / "models" / site):
            save_site_model(
                about, state, save=first_replica.save, results_dir=results_dir, site=site
            )
        workers[rank].parts.reporter.event(
            EventReason.MODEL_SAVED, str(about), iteration=max(r.iteration for r in replicas)
        )


def _evaluate(evaluator: Evaluator, ended_s: float, worker: VirtualWorker) -> EvaluatedSnapshot:
    """Evaluate one replica on all held-out samples. Thread-safe."""
    progress, model = worker.progress, worker.parts.replica.model
    tag = (progress.iteration, progress.own_samples, ended_s)
    return evaluator.evaluate_all(tag, snapshot=model.snapshot())
