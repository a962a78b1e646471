"""A whole job in virtual time, from the manifest to the saved model.

Owns the run: workers put together, the environment's changes, evaluation, the end. Called by the
command line, which says where records go. The same inputs give the same records and weights, bit
for bit, on one type of processor: all order is the virtual clock's, and an operation of TensorFlow
has one thread.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dlion_api.errors import UnavailableError
from dlion_api.membership import Member, Membership, MemberState
from dlion_api.progress import EvaluationRecord
from dlion_api.reasons import EventReason
from dlion_worker import policies
from dlion_worker.exchange import QueueRule
from dlion_worker.policies.catalogue import messages_must_arrive
from dlion_worker.policies.topology import neighbours_of
from dlion_worker.sidecar.director import Director
from dlion_worker.simulation.clock import Appointment, VirtualClock
from dlion_worker.simulation.costs import StepCosts
from dlion_worker.simulation.links import VirtualLink
from dlion_worker.simulation.network import Network
from dlion_worker.simulation.trace import Trace
from dlion_worker.simulation.worker import Phase, Surroundings, VirtualWorker, WorkerParts
from dlion_worker.trainer.finishing import Replica, choose_model, keep_model
from dlion_worker.trainer.replica import LocalReplica
from dlion_worker.trainer.reporting import Reporter
from dlion_worker.trainer.stopping import EvaluationSchedule
from dlion_worker.training import datasets, programs, threads
from dlion_worker.training.evaluation import Evaluator
from dlion_worker.training.model import FlatModel
from dlion_worker.training.optimizer import FlatOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dlion_api.measurements import Capacity
    from dlion_api.names import Rank, WorkerIdentity
    from dlion_api.progress import ProgressRecord
    from dlion_api.spec import Job
    from dlion_worker.environments.plan import Change, Conditions, Plan
    from dlion_worker.trainer.snapshot import WorkerState


@dataclass(frozen=True)
class SimulationOutcome:
    """How a simulated run ended."""

    stop_reason: str
    virtual_s: float
    wall_s: float
    trace_hash: str
    """Equal exactly where records and final weights are."""


class Simulation:
    """One job in one environment."""

    def __init__(
        self,
        *,
        job: Job,
        plan: Plan,
        results_dir: Path,
        data_root: Path,
        program_root: Path,
        on_record: Callable[[ProgressRecord], None],
        judge: Callable[[EvaluationRecord], str | None],
        fixed_core_s: float = 0.0,
        thread_count: int | None = None,
    ) -> None:
        """`judge` says why the run is over, given one replica's accuracy. `fixed_core_s`: what a
        step costs beside its samples. `thread_count`: gradients computed at a time (default: the
        machine's cores); it changes nothing but how long the simulation takes."""
        self._job, self._plan = job, plan
        self._results_dir, self._data_root = results_dir, data_root
        self._program_root = program_root
        self._judge = judge
        self._trace = Trace(on_record)
        self._clock = VirtualClock()
        self._network = Network(self._clock, plan.initial)
        self._costs = StepCosts(1.0 / plan.samples_per_s_per_core, fixed_core_s)
        self._thread_count = thread_count or len(os.sched_getaffinity(0))
        self._workers: dict[Rank, VirtualWorker] = {}
        self._schedules: dict[Rank, EvaluationSchedule] = {}
        self._stop_reason = ""
        self._ended_s: float | None = None
        self._to_come: list[Appointment] = []

    def run(self) -> SimulationOutcome:
        """Simulates to the end.

        Raises: DLionError as the parts say (data, program, divergence), OSError.
        """
        began_s = time.monotonic()
        threads.configure(1.0)
        with ThreadPoolExecutor(self._thread_count, "gradient") as executor:
            self._put_together(executor)
            self._start()
            while not self._all_stopped() and self._clock.advance():
                self._note_the_end()
        if not self._stop_reason:
            raise UnavailableError(self._deadlock())
        virtual_s = self._now_s()
        self._finish()
        for rank in sorted(self._workers):
            self._trace.weights(self._workers[rank].parts.replica.model.weights_D)
        return SimulationOutcome(
            self._stop_reason,
            virtual_s,
            time.monotonic() - began_s,
            self._trace.hexdigest(),
        )

    # ---- putting together ----------------------------------------------------------------------

    def _put_together(self, executor: ThreadPoolExecutor) -> None:
        trainer, identities = self._job.spec.trainer, self._job.workers()
        program = programs.load(trainer.program, directory=self._program_root)
        first: FlatModel | None = None
        around = Surroundings(
            self._clock, executor, told=self._told, stepped=self._stepped, stopped=self._stopped
        )
        for identity in identities:
            data = datasets.load(self._job, identity, program=program, data_root=self._data_root)
            if first is None:
                first = self._model(program, data)
                self._evaluator = self._evaluator_of(first, data)
            parts = self._parts(identity, data, first)
            parts.reporter.data_loaded(data)
            self._workers[identity.rank] = VirtualWorker(parts, around)
            self._schedules[identity.rank] = EvaluationSchedule(trainer.evaluation.every_samples)
        for identity in identities:
            self._link(identity.rank)

    def _model(self, program: programs.Program, data: datasets.DataSet) -> FlatModel:
        trainer = self._job.spec.trainer
        model = FlatModel(
            program,
            input_shape=data.input_shape,
            class_count=data.class_count,
            seed=trainer.seed,
            freeze=trainer.freeze,
            input_dtype=data.input_dtype,
        )
        if trainer.start_from:
            model.load_keras(self._data_root / trainer.start_from)
        return model

    def _evaluator_of(self, model: FlatModel, data: datasets.DataSet) -> Evaluator:
        trainer = self._job.spec.trainer
        return Evaluator(
            model,
            data.held_out_x,
            data.held_out_y,
            seed=trainer.seed,
            max_samples=trainer.evaluation.max_samples,
            on_result=lambda _result: None,
            on_error=lambda _error: None,
        )

    def _parts(
        self, identity: WorkerIdentity, data: datasets.DataSet, first: FlatModel
    ) -> WorkerParts:
        job, rank = self._job, identity.rank
        model = first.sibling(seed=job.spec.trainer.seed, rank=rank)
        optimizer = FlatOptimizer(job.spec.trainer.optimizer, model.layout.size)
        return WorkerParts(
            job=job,
            rank=rank,
            replica=LocalReplica(job, rank, model, optimizer),
            stream=datasets.BatchStream(data, seed=job.spec.trainer.seed, rank=rank),
            machine=policies.build_for(job, rank, model),
            director=Director(job, rank),
            reporter=Reporter(
                rank=rank,
                incarnation=1,
                start_monotonic_s=0.0,
                send=self._trace.take,
                clock_s=self._now_s,
            ),
            training_set_samples=data.training_set_samples,
            costs=self._costs,
            units=self._units(self._plan.initial, rank),
        )

    def _link(self, sender: Rank) -> None:
        keep = messages_must_arrive(self._job.spec)
        latencies = self._plan.initial.worker(sender).latency_s
        for receiver in sorted(neighbours_of(self._job, sender)):
            worker = self._workers[receiver]
            self._workers[sender].parts.links[receiver] = VirtualLink(
                self._clock,
                self._network,
                sender=sender,
                receiver=receiver,
                latency_s=latencies.get(receiver, 0.0),
                rule=QueueRule.KEEP if keep else QueueRule.NEWEST,
                deliver=partial(worker.deliver, sender),
            )

    def _units(self, conditions: Conditions, rank: Rank) -> float:
        quota = conditions.worker(rank).quota_cores
        return 1.0 if quota is None else quota / self._plan.core_scale

    # ---- the run -------------------------------------------------------------------------------

    def _start(self) -> None:
        members = tuple(
            Member(identity, 1, MemberState.READY, "", "") for identity in self._job.workers()
        )
        membership = Membership(1, self._job.key, len(members), members)
        for rank, worker in self._workers.items():
            peers = worker.parts.links
            alone = {p: self._plan.initial.link_bytes_per_s(rank, p) for p in peers}
            worker.meet(membership, alone)
        for worker in self._workers.values():
            worker.join(worker.parts.links)
            linked = f"linked with {len(worker.parts.links)} workers"
            worker.parts.reporter.event(EventReason.TRAINING_STARTED, linked)
        self._to_come = [
            self._clock.after(change.time_s, partial(self._change, change))
            for change in self._plan.changes
        ]
        if (most_s := self._job.spec.trainer.stop.max_seconds) is not None:
            over = partial(
                self._stopped, next(iter(self._workers)), f"maxSeconds {most_s:g} reached"
            )
            self._to_come.append(self._clock.after(most_s, over))
        for worker in self._workers.values():
            worker.begin_step()

    def _change(self, change: Change) -> None:
        self._network.set_conditions(change.conditions)
        for rank, worker in self._workers.items():
            worker.change_units(self._units(change.conditions, rank))

    def _told(self, rank: Rank, capacity: Capacity) -> None:
        for peer, worker in self._workers.items():
            if peer != rank:
                worker.heard(capacity)

    def _stepped(self, worker: VirtualWorker) -> None:
        if not self._schedules[worker.rank].due(worker.progress):
            return
        tag = (worker.progress.iteration, worker.progress.own_samples, self._clock.now_s)
        snapshot = worker.parts.replica.model.snapshot()
        result = self._evaluator.evaluate_some(tag, snapshot=snapshot)
        record = worker.parts.reporter.evaluation(result, final=False)
        reason = self._judge(record)
        if reason is not None:
            self._stopped(worker.rank, reason)

    def _stopped(self, rank: Rank, reason: str) -> None:
        if self._stop_reason:
            return
        self._stop_reason = reason
        self._workers[rank].parts.reporter.event(EventReason.TRAINING_STOPPED, reason)
        for worker in self._workers.values():
            worker.stopping = reason
        for appointment in self._to_come:
            appointment.cancel()

    def _now_s(self) -> float:
        """Virtual time; at the end, when the last worker did something."""
        return self._clock.now_s if self._ended_s is None else self._ended_s

    def _note_the_end(self) -> None:
        """After the stop nobody begins anything: what is under way takes no time of the run."""
        phases = {worker.phase for worker in self._workers.values()}
        if self._stop_reason and self._ended_s is None and Phase.COMPUTING not in phases:
            self._ended_s = self._clock.now_s

    def _deadlock(self) -> str:
        waits = "; ".join(
            f"worker {rank} waits for {', '.join(map(str, sorted(worker.awaited())))}"
            for rank, worker in self._workers.items()
        )
        return (
            f"nobody can go on after {self._clock.now_s:g} virtual seconds: {waits}. Does the "
            "environment cut links that it never restores?"
        )

    def _all_stopped(self) -> bool:
        return bool(self._stop_reason) and all(
            worker.phase is Phase.STOPPED for worker in self._workers.values()
        )

    # ---- the end -------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Replicas evaluated as they are, and one model saved for each site."""
        replicas = []
        for rank, worker in self._workers.items():
            progress, replica = worker.progress, worker.parts.replica
            tag = (progress.iteration, progress.own_samples, self._now_s())
            final = self._evaluator.evaluate_all(tag, snapshot=replica.model.snapshot())
            worker.parts.reporter.evaluation(final, final=True)
            replicas.append(
                Replica(rank, replica.state(), progress.own_samples, progress.iteration)
            )
        about, state = choose_model(
            self._job, replicas, accuracy_of=self._accuracy_of, stop_reason=self._stop_reason
        )
        leads = {worker.site: worker.rank for worker in reversed(self._job.workers())}
        for site, rank in sorted(leads.items()):
            keep_model(about, state, save=self._save, results_dir=self._results_dir, site=site)
            self._workers[rank].parts.reporter.event(
                EventReason.MODEL_SAVED, str(about), iteration=max(r.iteration for r in replicas)
            )
        self._evaluator.close()

    def _first_replica(self) -> LocalReplica:
        return next(iter(self._workers.values())).parts.replica

    def _accuracy_of(self, state: WorkerState) -> float:
        snapshot = self._first_replica().snapshot_of(state)
        return self._evaluator.evaluate_all(None, snapshot=snapshot).evaluation.accuracy

    def _save(self, path: Path, state: WorkerState) -> None:
        replica = self._first_replica()
        replica.model.save_keras(path, snapshot=replica.snapshot_of(state))
