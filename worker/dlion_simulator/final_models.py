"""Ends a virtual run: evaluates the replicas and saves one model per site.

`trainer.shutdown` decides which model is kept, and how.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

import numpy as np

from dlion_api.errors import UnavailableError
from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_core.lifecycle.evaluation import EvaluatedSnapshot
from dlion_results.run_folder.storage import writing
from dlion_simulator.worker import VirtualWorker
from dlion_worker.training.evaluation import Evaluator
from dlion_worker.training.replica import LocalReplica
from dlion_worker.training.site_model import (
    CollectedReplica,
    choose_model,
    save_site_model,
    site_leads,
)
from dlion_worker.training.snapshot import TrainingState


class FinalModels:
    """Evaluates and saves the models of the workers present at the end."""

    def __init__(
        self,
        job: Job,
        workers: Mapping[Rank, VirtualWorker],
        evaluator: Evaluator,
        executor: Executor,
    ) -> None:
        """`executor` runs evaluations in parallel."""
        self._job, self._workers, self._evaluator = job, workers, evaluator
        self._executor = executor

    def run(self, *, ended_s: float, stop_reason: str, results_dir: Path) -> None:
        """Evaluate all replicas and save the models.

        Raises UnavailableError if no worker is present, and StorageError.
        """
        if not self._workers:
            raise UnavailableError(f"{stop_reason}, and no worker was there to keep a model")
        replicas, known = [], {}
        finals = self._executor.map(partial(self._final, ended_s), self._workers.values())
        for (rank, worker), final in zip(self._workers.items(), finals, strict=True):
            progress, model = worker.progress, worker.parts.replica.model
            worker.parts.reporter.evaluation(final, final=True)
            # Training is over: weights need no copy, and optimizer state is not needed.
            own = TrainingState(model.weights_D, model.get_state(), np.zeros(0, np.float32))
            replicas.append(CollectedReplica(rank, own, progress.own_samples, progress.iteration))
            known[id(own)] = final.evaluation.accuracy
        about, state = choose_model(
            self._job,
            replicas,
            accuracy_of=lambda one: known[id(one)] if id(one) in known else self._accuracy_of(one),
            stop_reason=stop_reason,
        )
        sites = {worker.rank: worker.site for worker in self._job.workers()}
        for rank in sorted(site_leads(self._job, set(self._workers)), key=lambda r: sites[r]):
            site = sites[rank]
            with writing("cannot save the model", results_dir / "models" / site):
                save_site_model(
                    about,
                    state,
                    save=self._first_replica().save,
                    results_dir=results_dir,
                    site=site,
                )
            self._workers[rank].parts.reporter.event(
                EventReason.MODEL_SAVED, str(about), iteration=max(r.iteration for r in replicas)
            )

    def _final(self, ended_s: float, worker: VirtualWorker) -> EvaluatedSnapshot:
        """Evaluate one replica on all held-out samples. Thread-safe."""
        progress, model = worker.progress, worker.parts.replica.model
        tag = (progress.iteration, progress.own_samples, ended_s)
        return self._evaluator.evaluate_all(tag, snapshot=model.snapshot())

    def _first_replica(self) -> LocalReplica:
        return next(iter(self._workers.values())).parts.replica

    def _accuracy_of(self, state: TrainingState) -> float:
        snapshot = self._first_replica().snapshot_of(state)
        return self._evaluator.evaluate_all(None, snapshot=snapshot).evaluation.accuracy
