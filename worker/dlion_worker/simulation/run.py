"""A whole job in virtual time, from the manifest to the saved model.

Owns the run: workers put together, the environment's changes, evaluation, the end. Called by the
command line, which says where records go. The same inputs give the same records and weights, bit
for bit, on one type of processor: all order is the virtual clock's, and an operation of TensorFlow
has one thread. Who takes part when is `roster`'s business, the end `ending`'s.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from dlion_api.endings import stop_rule_met
from dlion_api.errors import UnavailableError
from dlion_api.progress import EvaluationRecord
from dlion_api.reasons import EventReason
from dlion_worker import policies
from dlion_worker.exchange import QueueRule
from dlion_worker.policies.catalogue import messages_must_arrive
from dlion_worker.policies.interface import MessageArrived
from dlion_worker.policies.topology import neighbours_of
from dlion_worker.sidecar.director import Director
from dlion_worker.simulation.clock import Appointment, VirtualClock
from dlion_worker.simulation.costs import StepCosts
from dlion_worker.simulation.ending import VirtualFinale
from dlion_worker.simulation.links import VirtualLink
from dlion_worker.simulation.network import Network
from dlion_worker.simulation.pace import Pace
from dlion_worker.simulation.roster import Roster
from dlion_worker.simulation.surroundings import Phase, Surroundings, WorkerParts
from dlion_worker.simulation.trace import Trace
from dlion_worker.simulation.worker import VirtualWorker
from dlion_worker.trainer.replica import LocalReplica
from dlion_worker.trainer.reporting import Reporter
from dlion_worker.trainer.stopping import EvaluationSchedule
from dlion_worker.training import datasets, programs, threads
from dlion_worker.training.evaluation import Evaluator
from dlion_worker.training.model import FlatModel
from dlion_worker.training.optimizer import FlatOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from dlion_api.names import Rank, WorkerIdentity
    from dlion_api.progress import ProgressRecord
    from dlion_api.spec import Job
    from dlion_worker.environments.plan import Change, Conditions, Plan
    from dlion_worker.policies.interface import Message

UNUSED_LINKS_EVERY_S = 10.0
"""With a server or on a sparse graph most links are such: reported every second, they would be most
of what is recorded, and a good part of a simulation's cost."""


@dataclass(frozen=True)
class SimulationOutcome:
    """How a simulated run ended."""

    stop_reason: str
    problem: str
    """What ended the run before its end; empty: it ended as it should."""
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
        exchange_core_s: float = 0.0,
        exchange_core_s_per_byte: Mapping[Rank, float] = MappingProxyType({}),
        lost: Callable[[Rank], str | None] = lambda _rank: None,
        thread_count: int | None = None,
    ) -> None:
        """`judge` says why the run is over, given one replica's accuracy, and `lost`, told of a
        worker that never comes back. `fixed_core_s`: what a step costs beside its samples,
        `exchange_core_s`: and beside computing; `exchange_core_s_per_byte`: and by the byte, of
        each worker. `thread_count`: gradients computed at a time
        (default: the machine's cores); it changes nothing but how long the simulation takes."""
        self._job, self._plan = job, plan
        self._results_dir, self._data_root = results_dir, data_root
        self._program_root = program_root
        self._judge, self._lost = judge, lost
        self._trace = Trace(on_record)
        self._clock = VirtualClock()
        self._network = Network(self._clock, plan.initial)
        per_sample_core_s = 1.0 / plan.samples_per_s_per_core
        self._costs = StepCosts(per_sample_core_s, fixed_core_s, exchange_core_s)
        self._exchange_core_s_per_byte = exchange_core_s_per_byte
        self._thread_count = thread_count or len(os.sched_getaffinity(0))
        self._conditions = plan.initial
        self._opened = datasets.OpenedOnce()
        self._loaded: dict[Rank, datasets.DataSet] = {}
        self._paces: dict[Rank, Pace] = {}
        every_samples = job.spec.trainer.evaluation.every_samples
        self._schedules = {w.rank: EvaluationSchedule(every_samples) for w in job.workers()}
        self._stop_reason = self._problem = ""
        self._last_s = 0.0
        """When the last worker did something, once the run is to end."""
        self._standing: list[Phase] = []
        self._ended_s: float | None = None
        self._over: Appointment | None = None
        self._to_come: list[Appointment] = []

    def run(self) -> SimulationOutcome:
        """Simulates to the end.

        Raises: DLionError as the parts say (data, program, divergence), OSError.
        """
        began_s = time.monotonic()
        threads.configure(1.0)
        executor = ThreadPoolExecutor(self._thread_count, "gradient")
        try:
            self._put_together(executor)
            self._start()
            self._train()
            virtual_s = self._ended_s = max(self._last_s, self._trace.latest_s)
            inside = self._roster.inside
            for worker in inside.values():
                worker.report_links(now=True)
            VirtualFinale(self._job, inside, self._evaluator, executor).run(
                ended_s=virtual_s, stop_reason=self._stop_reason, results_dir=self._results_dir
            )
            self._evaluator.close()
        finally:
            executor.shutdown(cancel_futures=True)  # where it broke off, nobody takes them
        for worker in inside.values():
            self._trace.weights(worker.parts.replica.model.weights_D)
        return SimulationOutcome(
            self._stop_reason,
            self._problem,
            virtual_s,
            time.monotonic() - began_s,
            self._trace.hexdigest(),
        )

    def _train(self) -> None:
        """Until all have stopped. Raises: UnavailableError where nobody can go on before that."""
        while not self._all_stopped():
            # `maxSeconds` alone would end a run in which nothing can happen: that is no success.
            if not self._stop_reason and self._clock.has_only(self._over):
                raise UnavailableError(self._deadlock())
            if not self._clock.advance():
                return
            self._note_the_end()

    # ---- putting together ----------------------------------------------------------------------

    def _put_together(self, executor: ThreadPoolExecutor) -> None:
        trainer = self._job.spec.trainer
        self._program = programs.load(trainer.program, directory=self._program_root)
        first = self._job.workers()[0]
        data = self._data(first)
        self._loaded[first.rank] = data
        self._first = self._model(self._program, data)
        self._evaluator = self._evaluator_of(self._first, data)
        self._roster = Roster(
            self._job,
            self._plan,
            self._clock,
            self._network,
            build=self._worker,
            stopped=self._stop,
            failed=self._fail,
            lost=self._lost,
        )
        self._around = Surroundings(
            self._clock,
            executor,
            told=self._roster.told,
            measured=self._roster.measure,
            regrouped=self._roster.regroup,
            stepped=self._stepped,
            stopped=self._stopped,
            behind=self._roster.come_in_anew,
        )

    def _worker(self, identity: WorkerIdentity, incarnation: int) -> VirtualWorker:
        data = self._loaded.pop(identity.rank, None) or self._data(identity)
        parts = self._parts(identity, data, incarnation)
        parts.reporter.data_loaded(data)
        self._link(parts)
        return VirtualWorker(parts, self._around)

    def _data(self, identity: WorkerIdentity) -> datasets.DataSet:
        return datasets.load(
            self._job,
            identity,
            program=self._program,
            data_root=self._data_root,
            opened=self._opened,
        )

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
        self, identity: WorkerIdentity, data: datasets.DataSet, incarnation: int
    ) -> WorkerParts:
        job, rank = self._job, identity.rank
        model = self._first.sibling(seed=job.spec.trainer.seed, rank=rank)
        optimizer = FlatOptimizer(job.spec.trainer.optimizer, model.layout.size)
        replica = LocalReplica(job, rank, model, optimizer)
        return WorkerParts(
            job=job,
            rank=rank,
            replica=replica,
            stream=datasets.BatchStream(data, seed=job.spec.trainer.seed, rank=rank),
            machine=policies.build_for(job, rank, replica),
            director=Director(job, rank),
            reporter=Reporter(
                rank=rank,
                incarnation=incarnation,
                start_monotonic_s=0.0,
                send=self._trace.take,
                clock_s=self._now_s,
                unused_links_every_s=UNUSED_LINKS_EVERY_S,
            ),
            training_set_samples=data.training_set_samples,
            costs=replace(
                self._costs,
                exchange_core_s_per_byte=self._exchange_core_s_per_byte.get(rank, 0.0),
            ),
            pace=self._pace(rank),
            units=self._units(self._conditions, rank),
        )

    def _pace(self, rank: Rank) -> Pace:
        """One for all incarnations: a new process does not begin the draws anew."""
        if rank not in self._paces:
            self._paces[rank] = Pace(
                self._plan.stragglers, seed=self._job.spec.trainer.seed, rank=rank
            )
        return self._paces[rank]

    def _link(self, parts: WorkerParts) -> None:
        keep, sender = messages_must_arrive(self._job.spec), parts.rank
        for receiver in sorted(neighbours_of(self._job, sender)):
            parts.links[receiver] = VirtualLink(
                self._clock,
                self._network,
                sender=sender,
                receiver=receiver,
                rule=QueueRule.KEEP if keep else QueueRule.NEWEST,
                deliver=partial(self._deliver, sender, receiver),
                give_up=partial(self._roster.give_up, sender, receiver),
            )

    def _deliver(self, sender: Rank, receiver: Rank, message: Message) -> None:
        self._roster.workers[receiver].arrive(MessageArrived(sender, message))

    def _units(self, conditions: Conditions, rank: Rank) -> float:
        quota = conditions.worker(rank).quota_cores
        return 1.0 if quota is None else quota / self._plan.core_scale

    # ---- the run -------------------------------------------------------------------------------

    def _start(self) -> None:
        self._roster.begin()
        self._to_come = [
            self._clock.after(change.time_s, partial(self._change, change))
            for change in self._plan.changes
        ]
        self._to_come += self._roster.appointments()
        if (most_s := self._job.spec.trainer.stop.max_seconds) is not None:
            over = partial(self._stop, stop_rule_met("maxSeconds", most_s))
            self._over = self._clock.after(most_s, over)
            self._to_come.append(self._over)
        for worker in self._roster.workers.values():
            worker.begin_step()

    def _change(self, change: Change) -> None:
        self._conditions = change.conditions
        self._roster.change(change.conditions)
        for rank, worker in self._roster.present.items():
            worker.change_units(self._units(change.conditions, rank))

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

    def _stop(self, reason: str) -> None:
        """Nobody in particular says so."""
        ranks = [*self._roster.inside, *self._roster.workers]
        self._stopped(ranks[0], reason)

    def _fail(self, problem: str) -> None:
        """The run ends in order, but it is none that has succeeded."""
        if not self._stop_reason:
            self._problem = problem
            self._stop(problem)

    def _stopped(self, rank: Rank, reason: str) -> None:
        if self._stop_reason:
            return
        self._stop_reason = reason
        worker = self._roster.workers[rank]
        worker.parts.reporter.event(EventReason.TRAINING_STOPPED, reason)
        self._roster.stop(reason)
        for appointment in self._to_come:
            appointment.cancel()

    def _now_s(self) -> float:
        """Virtual time; when all is over, when the last worker did something."""
        return self._clock.now_s if self._ended_s is None else self._ended_s

    def _note_the_end(self) -> None:
        """After the stop nobody begins anything: the run lasts until the last one has finished the
        step under way. What is then still on links takes no time of it."""
        if not self._stop_reason:
            return
        standing = [worker.phase for worker in self._roster.workers.values()]
        if standing != self._standing:
            self._standing, self._last_s = standing, self._clock.now_s

    def _deadlock(self) -> str:
        who = "; ".join(
            f"worker {rank} {self._stuck(worker)}" for rank, worker in self._roster.workers.items()
        )
        return (
            f"nobody can go on after {self._clock.now_s:g} virtual seconds: {who}. Does the "
            "environment take workers or links away that it never restores?"
        )

    def _stuck(self, worker: VirtualWorker) -> str:
        match worker.phase:
            case Phase.GONE:
                return "is gone"
            case Phase.ENTERING:
                return "waits for others to come"
        if worker.holds_still:
            return "holds still: too few sites (minSites) are joined with it"
        return f"waits for {', '.join(map(str, sorted(worker.awaited())))}"

    def _all_stopped(self) -> bool:
        return bool(self._stop_reason) and all(
            worker.phase is Phase.STOPPED for worker in self._roster.present.values()
        )
