"""Simulates a whole job in virtual time, from the manifest to the saved model.

Builds the workers, applies the environment's changes, evaluates replicas and decides when the run
ends. The same inputs give bit-identical records and weights on one type of processor: the virtual
clock fixes the order, and each TensorFlow operation runs on one thread. `churn` decides which
workers take part; `final_models` handles the end.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from dlion_api.endings import stop_rule_met
from dlion_api.errors import UnavailableError
from dlion_api.names import Rank, WorkerIdentity
from dlion_api.protocol.progress import EvaluationRecord, ProgressRecord
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_core.lifecycle.reporting import Reporter
from dlion_core.lifecycle.stopping import EvaluationSchedule
from dlion_core.links.link_budget import QueueRule
from dlion_core.policies import factory
from dlion_core.policies.catalogue import local_optimizer, messages_must_arrive
from dlion_core.policies.interface import Message, MessageArrived
from dlion_core.resource_control.resource_controller import ResourceController
from dlion_core.topology.regrouping import CHECK_INTERVAL_S
from dlion_core.topology.topology import CLUSTERED, neighbours_of
from dlion_environments.plan import Conditions, ConditionsChange, Plan
from dlion_environments.slow_exchange import report_slow_exchange, slowest_link
from dlion_simulator.churn import ChurnController
from dlion_simulator.clock import ScheduledEvent, VirtualClock
from dlion_simulator.context import SimulationContext, WorkerParts, WorkerPhase
from dlion_simulator.costs import StepCosts, StragglerModel
from dlion_simulator.final_models import save_final_models
from dlion_simulator.links import VirtualLink
from dlion_simulator.machines.demand import worker_demands
from dlion_simulator.machines.heat import MachineHeat
from dlion_simulator.network import VirtualNetwork
from dlion_simulator.quarantine import VirtualQuarantine
from dlion_simulator.trace import Trace
from dlion_simulator.worker import VirtualWorker
from dlion_worker.initializers.folders import model_root
from dlion_worker.training import datasets, programs, threads
from dlion_worker.training.evaluation import Evaluator
from dlion_worker.training.keras_optimizer import make_optimizer
from dlion_worker.training.private.model import model_of
from dlion_worker.training.programs.compiled import unused_optimizer
from dlion_worker.training.staged.sensor import local_replica, local_stream

UNUSED_LINKS_INTERVAL_S = 10.0
"""With a parameter server or a sparse graph most links are unused. Reporting them every second
would dominate the records and cost much time."""


@dataclass(frozen=True)
class SimulationOutcome:
    """Result of a simulated run."""

    stop_reason: str
    problem: str
    """Why the run failed before its end; empty if it ended normally."""
    virtual_s: float
    wall_s: float
    trace_hash: str
    """Equal if and only if the records and final weights are equal."""


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
        on_record: Callable[[ProgressRecord, str], None],
        judge: Callable[[EvaluationRecord], str | None],
        fixed_core_s: float = 0.0,
        exchange_core_s: float = 0.0,
        exchange_core_s_per_byte: Mapping[Rank, float] = MappingProxyType({}),
        lost: Callable[[Rank], str | None] = lambda _rank: None,
        thread_count: int | None = None,
    ) -> None:
        """Set up a simulation of `job` under `plan`.

        `on_record` takes each record and its JSON. `judge` returns a reason to stop, given one
        replica's accuracy. `lost` does so for a worker that never returns. Step costs, in core
        seconds: `fixed_core_s` per step, `exchange_core_s` per step for the exchange, and
        `exchange_core_s_per_byte` by worker.
        `thread_count` is the number of gradients computed in parallel (default: all cores); it
        affects wall time only.
        """
        self._job, self._plan = job, plan
        self._results_dir, self._data_root = results_dir, data_root
        self._program_root = program_root
        self._judge, self._lost = judge, lost
        self._trace = Trace(on_record)
        self._clock = VirtualClock()
        self._network = VirtualNetwork(self._clock, plan.initial)
        per_sample_core_s = 1.0 / plan.samples_per_s_per_core
        self._costs = StepCosts(per_sample_core_s, fixed_core_s, exchange_core_s)
        self._exchange_core_s_per_byte = exchange_core_s_per_byte
        self._thread_count = thread_count or len(os.sched_getaffinity(0))
        self._conditions = plan.initial
        self._dataset_cache = datasets.DatasetCache()
        self._loaded: dict[Rank, datasets.DataSet] = {}
        self._straggler_models = {
            w.rank: StragglerModel(plan.stragglers, seed=job.spec.trainer.seed, rank=w.rank)
            for w in job.workers()
        }
        """One for all incarnations of a worker: a restart does not reset the draws."""
        budget = job.spec.node_policies.heat
        self._heat = {rank: MachineHeat(each, budget) for rank, each in plan.thermals.items()}
        self._demand = worker_demands(job, plan)
        self._schedules = {w.rank: EvaluationSchedule.of(job, w.rank) for w in job.workers()}
        self._stop_reason = self._problem = ""
        self._last_s = 0.0
        """Virtual time of the last worker activity after the stop."""
        self._last_phases: list[WorkerPhase] = []
        self._ended_s: float | None = None
        self._deadline: ScheduledEvent | None = None
        self._scheduled: list[ScheduledEvent] = []

    def run(self) -> SimulationOutcome:
        """Simulate to the end. Raises DLionError for bad data, a bad program or divergence, and
        OSError."""
        began_s = time.monotonic()
        threads.configure(1.0)
        executor = ThreadPoolExecutor(self._thread_count, "gradient")
        try:
            self._build(executor)
            self._start()
            self._train()
            virtual_s = self._ended_s = max(self._last_s, self._trace.latest_s)
            training = self._churn.training
            for worker in training.values():
                worker.report_links(now=True)
                worker.report_machine(virtual_s)
            save_final_models(
                self._job,
                training,
                self._evaluator,
                executor,
                ended_s=virtual_s,
                stop_reason=self._stop_reason,
                results_dir=self._results_dir,
            )
            self._evaluator.close()
        finally:
            executor.shutdown(cancel_futures=True)  # after an error their results are not needed
        for worker in training.values():
            self._trace.weights(worker.parts.replica.model.weights_D)
        return SimulationOutcome(
            self._stop_reason,
            self._problem,
            virtual_s,
            time.monotonic() - began_s,
            self._trace.hexdigest(),
        )

    def _train(self) -> None:
        """Advance until all workers have stopped. Raises UnavailableError on a deadlock."""
        while not self._all_stopped():
            # With only `maxSeconds` left the run is deadlocked and must not count as a success.
            if not self._stop_reason and self._clock.has_only(self._deadline):
                raise UnavailableError(self._deadlock_message())
            if not self._clock.advance():
                return
            self._update_end_time()

    # ---- putting together ----------------------------------------------------------------------

    def _build(self, executor: ThreadPoolExecutor) -> None:
        trainer = self._job.spec.trainer
        self._program = programs.load(trainer.program, directory=self._program_root)
        first = self._job.workers()[0]
        data = self._loaded[first.rank] = self._data(first)
        self._template_model = model_of(self._program, data, trainer, is_repeatable=True)
        if trainer.start_from:
            start = model_root(trainer, self._data_root) / trainer.start_from
            self._template_model.load_keras(start)
        self._evaluator = Evaluator(
            self._template_model,
            data.held_out_x,
            data.held_out_y,
            seed=trainer.seed,
            max_samples=trainer.evaluation.max_samples,
        )
        self._churn = ChurnController(
            self._job,
            self._plan,
            self._clock,
            self._network,
            build=self._worker,
            on_stop=self._stop,
            on_failure=self._fail_run,
            lost=self._lost,
        )
        self._quarantine = VirtualQuarantine(self._job, self._clock, self._churn)
        self._context = SimulationContext(
            self._clock,
            executor,
            publish_capacity=self._churn.publish_capacity,
            probe_links=self._churn.probe_links,
            set_neighbours=self._churn.set_neighbours,
            step_finished=self._on_step,
            on_stop=self._stop_run,
            rejoin=self._churn.rejoin,
        )

    def _worker(self, identity: WorkerIdentity, incarnation: int) -> VirtualWorker:
        data = self._loaded.pop(identity.rank, None) or self._data(identity)
        parts = self._parts(identity, data, incarnation)
        parts.reporter.near_duplicates(data.near_duplicates_left_out, kept=data.samples)
        self._link(parts)
        if identity == self._job.workers()[0] and incarnation == 1:
            self._report_notes(parts.reporter)
        return VirtualWorker(parts, self._context)

    def _report_notes(self, reporter: Reporter) -> None:
        """Report what has no effect: a part of the program, or the exchange."""
        program = self._template_model.program
        notes = [unused_optimizer(program, self._job.spec.trainer.optimizer)]
        if program.callbacks is not None:
            notes.append("callbacks() is not called in virtual time; `dlion run` calls it")
        for note in filter(None, notes):
            reporter.event(EventReason.PROGRAM_PART_UNUSED, note, warning=True)
        size, link = self._template_model.layout.size, slowest_link(self._job, self._plan)
        report_slow_exchange(self._job.spec, size, link, reporter)

    def _data(self, identity: WorkerIdentity) -> datasets.DataSet:
        return datasets.load(
            self._job,
            identity,
            program=self._program,
            data_root=self._data_root,
            cache=self._dataset_cache,
        )

    def _parts(
        self, identity: WorkerIdentity, data: datasets.DataSet, incarnation: int
    ) -> WorkerParts:
        job, rank = self._job, identity.rank
        model = self._template_model.sibling(seed=job.spec.trainer.seed, rank=rank)
        optimizer = make_optimizer(model, local_optimizer(job.spec))
        stream = local_stream(job, rank, data)
        replica = local_replica(job, rank, model, optimizer, stream)
        replica.measure_on(data.held_out_x, data.held_out_y)
        return WorkerParts(
            job=job,
            rank=rank,
            replica=replica,
            stream=stream,
            machine=factory.build_for(job, rank, replica, 0),  # a run can be repeated
            # Virtual receivers read at once.
            director=ResourceController(job, rank, receiver_delay_s=0.0),
            reporter=Reporter(
                rank=rank,
                incarnation=incarnation,
                start_monotonic_s=0.0,
                send=self._take,
                clock_s=self._report_time_s,
                unused_links_every_s=UNUSED_LINKS_INTERVAL_S,
            ),
            training_set_samples=data.training_set_samples,
            costs=replace(
                self._costs, exchange_core_s_per_byte=self._exchange_core_s_per_byte.get(rank, 0.0)
            ),
            straggler_model=self._straggler_models[rank],
            units=self._units(self._conditions, rank),
            heat=self._heat.get(rank),
            demand=self._demand.get(rank),
        )

    def _link(self, parts: WorkerParts) -> None:
        keep, sender = messages_must_arrive(self._job.spec), parts.rank
        for receiver in sorted(neighbours_of(self._job, sender)):
            parts.links[receiver] = VirtualLink(
                self._clock,
                self._network,
                sender=sender,
                receiver=receiver,
                rule=QueueRule.KEEP if keep else QueueRule.NEWEST,
                overhead_bytes=self._plan.message_overhead_bytes,
                deliver=partial(self._deliver, sender, receiver),
                give_up=partial(self._churn.give_up, sender, receiver),
            )

    def _deliver(self, sender: Rank, receiver: Rank, message: Message) -> None:
        self._churn.workers[receiver].arrive(MessageArrived(sender, message))

    def _units(self, conditions: Conditions, rank: Rank) -> float:
        quota = conditions.worker(rank).quota_cores
        return 1.0 if quota is None else quota / self._plan.core_scale

    # ---- the run -------------------------------------------------------------------------------

    def _start(self) -> None:
        self._churn.begin()
        self._scheduled = [
            self._clock.after(change.time_s, partial(self._change, change))
            for change in self._plan.changes
        ]
        self._scheduled += self._churn.schedule_absences()
        if (max_s := self._job.spec.trainer.stop.max_seconds) is not None:
            over = partial(self._stop, stop_rule_met("maxSeconds", max_s))
            self._deadline = self._clock.after(max_s, over)
            self._scheduled.append(self._deadline)
        if self._job.spec.exchange.topology == CLUSTERED:
            self._clock.after(CHECK_INTERVAL_S, self._check_links)
        for worker in self._churn.workers.values():
            worker.advance()

    def _check_links(self) -> None:
        """Let sidecars probe and regroup while steps are long, unless nothing else happens."""
        if not self._stop_reason and not self._clock.has_only(self._deadline):
            self._churn.check_links()
            self._clock.after(CHECK_INTERVAL_S, self._check_links)

    def _change(self, change: ConditionsChange) -> None:
        self._conditions = change.conditions
        self._churn.change(change.conditions)
        for rank, worker in self._churn.present.items():
            worker.set_compute_units(self._units(change.conditions, rank))

    def _on_step(self, worker: VirtualWorker) -> None:
        # A slow worker that does not wait counts too few: its own iterations times the batch.
        counted = sum(one.progress.own_samples for one in self._churn.training.values())
        samples = max(worker.progress.job_samples, counted)
        is_mid_round = worker.parts.machine.is_mid_round
        if not self._schedules[worker.rank].due(samples, is_mid_round=is_mid_round):
            return
        tag = (worker.progress.iteration, worker.progress.own_samples, self._clock.now_s)
        snapshot = worker.parts.replica.model.snapshot()
        result = self._evaluator.evaluate_subset(tag, snapshot=snapshot)
        record = worker.parts.reporter.evaluation(result, final=False)
        reason = self._judge(record)
        if reason is not None:
            self._stop_run(worker.rank, reason)

    def _stop(self, reason: str) -> None:
        """Stop the run without a particular worker as the cause."""
        ranks = [*self._churn.training, *self._churn.workers]
        self._stop_run(ranks[0], reason)

    def _fail_run(self, problem: str) -> None:
        """End the run in order, but as a failure."""
        if not self._stop_reason:
            self._problem = problem
            self._stop(problem)

    def _stop_run(self, rank: Rank, reason: str) -> None:
        if self._stop_reason:
            return
        self._stop_reason = reason
        worker = self._churn.workers[rank]
        worker.parts.reporter.event(EventReason.TRAINING_STOPPED, reason)
        self._churn.stop(reason)
        for event in self._scheduled:
            event.cancel()

    def _take(self, records: Sequence[ProgressRecord]) -> None:
        self._trace.take(records)
        for record in records:
            self._quarantine.take(record)

    def _report_time_s(self) -> float:
        """Virtual time; after the run, the time of the last activity."""
        return self._clock.now_s if self._ended_s is None else self._ended_s

    def _update_end_time(self) -> None:
        """Track when the last worker finishes its current step after the stop. Transfers that are
        still in flight then do not extend the run."""
        if not self._stop_reason:
            return
        phases = [worker.phase for worker in self._churn.workers.values()]
        if phases != self._last_phases:
            self._last_phases, self._last_s = phases, self._clock.now_s

    def _deadlock_message(self) -> str:
        blocked = "; ".join(
            f"worker {rank} {worker.blocked_reason}" for rank, worker in self._churn.workers.items()
        )
        return (
            f"no worker can continue after {self._clock.now_s:g} virtual seconds: {blocked}. Does "
            "the environment take workers or links away that it never restores?"
        )

    def _all_stopped(self) -> bool:
        return bool(self._stop_reason) and all(
            worker.phase is WorkerPhase.STOPPED for worker in self._churn.present.values()
        )
