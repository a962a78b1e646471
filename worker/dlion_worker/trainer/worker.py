"""One incarnation of one worker, put together and seen from its start to its end.

Owns the order: data and model, credentials, links, joining, coming into the run, training,
finishing. Called by `__main__` alone.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from dlion_api.endings import EndReport
from dlion_api.membership import Membership
from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_api.worker_config import WorkerConfig
from dlion_worker import policies
from dlion_worker.coordination import CoordinationClient, next_incarnation
from dlion_worker.credentials import WorkerCredentials
from dlion_worker.evaluator import handover
from dlion_worker.exchange import Exchange, ExchangeConfig, QueueRule, StateSnapshot
from dlion_worker.policies.catalogue import has_barrier, messages_must_arrive
from dlion_worker.policies.message_sizes import most_message_bytes
from dlion_worker.sidecar_client import SidecarClient
from dlion_worker.trainer.checkpointing import Checkpointer
from dlion_worker.trainer.companions import Companions
from dlion_worker.trainer.end_report import end_report
from dlion_worker.trainer.entrance import Entrance
from dlion_worker.trainer.finishing import Finale, Replica, take_leave
from dlion_worker.trainer.inbox import Inbox
from dlion_worker.trainer.interruption import Interrupted, Signals
from dlion_worker.trainer.loop import Parts, TrainingLoop
from dlion_worker.trainer.neighbourhood import Neighbourhood
from dlion_worker.trainer.probing import trace_first
from dlion_worker.trainer.refusals import Refusals
from dlion_worker.trainer.renewing import Renewing, first_credentials
from dlion_worker.trainer.replica import LocalReplica
from dlion_worker.trainer.reporting import Reporter
from dlion_worker.trainer.saving import Saving
from dlion_worker.trainer.snapshot import WorkerState
from dlion_worker.trainer.stopping import EvaluationSchedule, JobProgress
from dlion_worker.trainer.waiting import Waiting
from dlion_worker.training import datasets, programs
from dlion_worker.training.evaluation import Evaluated, Evaluator
from dlion_worker.training.model import FlatModel
from dlion_worker.training.optimizer import FlatOptimizer


class Worker:
    """Everything that one incarnation holds; `run` trains to the end, `close` lets go of it."""

    def __init__(self, config: WorkerConfig, job: Job, signals: Signals) -> None:
        self._config = config
        self._job = job
        self._rank = Rank(config.rank)
        self._signals = signals
        self._identity = job.worker(self._rank)
        self._progress = JobProgress()
        self._held: tuple[Rank, ...] = ()
        self._incarnation = next_incarnation(config.state_dir)
        self._closing = ExitStack()
        self._sidecar = SidecarClient(config.socket_path)
        self._coordination = CoordinationClient(
            config,
            job=job.key,
            worker=self._identity,
            spec_hash=job.hash(),
            incarnation=self._incarnation,
        )
        self._members = self._coordination.membership
        self._came_back = self._members() is not None
        self._inbox = Inbox(lambda peer, message: self._exchange.send(peer, message), self._members)
        self._reporter = Reporter(
            rank=self._rank,
            incarnation=self._incarnation,
            start_monotonic_s=self._coordination.start_time_monotonic_s(),
            send=self._coordination.report,
        )
        self._refusals = Refusals(
            self._reporter, self._sidecar, lambda: self._exchange, lambda: self._progress.iteration
        )
        self._reporter.event(
            EventReason.TRAINER_IMPORTED, f"incarnation {self._incarnation} has imported TensorFlow"
        )

    # ---- the whole way ---------------------------------------------------------------------------

    def run(self) -> str:
        """From loading to the saved model; why the run ended.

        Raises: `Interrupted` before training and once all is saved; ModelLostError once all is
            over; DLionError and OSError as the parts say.
        """
        self._load()
        credentials = first_credentials(
            self._config,
            self._job,
            self._coordination,
            came_back=self._came_back,
            interrupted=self._is_interrupted,
        )
        self._saving.open(self._job.key, self._identity, self._incarnation, credentials)
        self._closing.callback(self._saving.close)
        if self._saving.take_up(came_back=self._came_back):
            self._inbox.iteration = self._progress.iteration
        self._open_links(credentials)
        self._join(credentials)
        self._enter()
        with self._signals.patiently():
            reason = self._train()
            if self._is_interrupted():
                self._saving.save_last()
                if has_barrier(self._job.spec):
                    take_leave(self._exchange, self._inbox, reason, self._progress.iteration)
                self._saving.wait_for_last()
                return reason
            self._report(EventReason.TRAINING_STOPPED, reason, warning=False)
            self._saving.save()
        self._finish(reason)
        self._saving.check_model()
        return reason

    def end_report(self, reason: str) -> EndReport:
        """What this worker reports once it has ended in order for that reason."""
        at, held = self._progress.iteration, self._held
        return end_report(reason, at, held=held, membership=self._members())

    def close(self, *, finished: bool) -> None:
        """Ends links, threads and the coordinator's stream; `finished`: this worker is done."""
        self._closing.close()
        if finished:
            self._coordination.finish()
        else:
            self._coordination.close()
        self._sidecar.close()

    # ---- before training -------------------------------------------------------------------------

    def _load(self) -> None:
        trainer = self._job.spec.trainer
        root = Path(self._config.data_root)
        program = programs.load(trainer.program, directory=self._config.program_dir)
        self._data = datasets.load(self._job, self._identity, program=program, data_root=root)
        self._reporter.data_loaded(self._data)
        model = FlatModel(
            program,
            input_shape=self._data.input_shape,
            class_count=self._data.class_count,
            seed=trainer.seed,
            rank=self._rank,
            freeze=trainer.freeze,
            input_dtype=self._data.input_dtype,
        )
        if trainer.start_from:
            model.load_keras(root / trainer.start_from)
        self._stream = datasets.BatchStream(self._data, seed=trainer.seed, rank=self._rank)
        optimizer = FlatOptimizer(trainer.optimizer, model.layout.size)
        self._replica = LocalReplica(self._job, self._rank, model, optimizer)
        self._machine = policies.build_for(self._job, self._rank, self._replica)
        self._saving = Saving(
            self._config,
            checkpointer=partial(
                Checkpointer,
                every_s=self._job.spec.checkpoint.every_seconds,
                replica=self._replica,
                progress=self._progress,
                stream=self._stream,
                machine=self._machine,
            ),
            progress=self._progress,
            reporter=self._reporter,
        )
        trace_first(model, self._stream)
        self._evaluator = Evaluator(
            model,
            self._data.held_out_x,
            self._data.held_out_y,
            seed=trainer.seed,
            max_samples=trainer.evaluation.max_samples,
            on_result=self._evaluated,
            on_error=self._evaluation_failed,
        )
        self._closing.callback(self._evaluator.close)

    def _open_links(self, credentials: WorkerCredentials) -> None:
        keeps = messages_must_arrive(self._job.spec)
        self._exchange = Exchange(
            ExchangeConfig(
                job=self._job.key,
                identity=self._identity,
                incarnation=self._incarnation,
                credentials=credentials,
                listen_host=self._config.listen_host,
                listen_port=self._config.exchange_port,
                advertise_host=self._config.advertise_host,
                is_exposed=self._job.spec.network.exposure != "PodNetwork",
                max_message_bytes=most_message_bytes(self._job, self._replica.model.layout),
                queue_rule=QueueRule.KEEP if keeps else QueueRule.NEWEST,
            ),
            on_event=self._refusals.sieve(self._inbox.put),
            state_provider=self._replica.provide,
        )
        self._closing.callback(self._exchange.close)
        self._exchange.start()
        self._neighbourhood = Neighbourhood(
            self._job, self._config, self._exchange, self._members, regrouped=self._inbox.put
        )
        self._sidecar.on_directive(self._neighbourhood.directed)
        self._companions = Companions(
            self._job,
            self._config,
            data=self._data,
            stream=self._stream,
            replica=self._replica,
            exchange=self._exchange,
            neighbourhood=self._neighbourhood,
            sidecar=self._sidecar,
            coordination=self._coordination,
            credentials=credentials,
            reporter=self._reporter,
            kept=self._saving.bring_model,
        )
        self._closing.callback(self._companions.close)

    def _join(self, credentials: WorkerCredentials) -> None:
        renewing = Renewing(
            self._config,
            self._job.key,
            credentials=credentials,
            coordination=self._coordination,
            remake_links=self._exchange.remake_links,
            trust_changed=self._companions.tell_sidecar,
            report=self._report,
        )
        self._coordination.join(
            self._exchange.address, self._sidecar.endpoint(), self._members_changed, renewing.trust
        )
        self._closing.callback(renewing.close)
        renewing.start()
        self._reporter.event(
            EventReason.WORKER_READY, f"incarnation {self._incarnation} is ready to train"
        )

    def _members_changed(self, _: Membership) -> None:
        self._neighbourhood.update()
        self._companions.tell_sidecar()

    def _enter(self) -> None:
        snapshot = self._come_in()
        if self._inbox.stop_reason is None:
            linked = f"linked with {len(self._inbox.linked)} workers"
            iteration = self._progress.iteration
            self._reporter.event(EventReason.TRAINING_STARTED, linked, iteration=iteration)
        if snapshot is None:
            self._companions.tell_speed(self._inbox, self._stopped)

    def _come_in(self, *, comes_back: bool = False) -> StateSnapshot | None:
        """The peer's state that it goes on from; None: its own is right."""
        near = self._neighbourhood
        among = None if near.is_everybody else near.neighbours
        entrance = Entrance(
            job=self._job,
            rank=self._rank,
            exchange=self._exchange,
            inbox=self._inbox,
            membership=self._members,
            stopped=self._stopped,
            state_bytes=2 * self._replica.model.weights_D.nbytes,
            comes_back=comes_back,
            neighbours=among,
            waits=Waiting(self._rank, self._exchange, self._reporter, self._members, among).tell,
        )
        with self._signals.promptly():
            snapshot = entrance.come_in()
        if snapshot is not None:
            batching = self._job.spec.batching
            self._saving.overtake(snapshot, batch_samples=batching.global_batch_size.initial)
        return snapshot

    # ---- training and the end --------------------------------------------------------------------

    def _train(self) -> str:
        every_samples = self._job.spec.trainer.evaluation.every_samples
        done = self._progress.job_samples // every_samples
        self._schedule = EvaluationSchedule(every_samples, done=done)
        self._loop = TrainingLoop(
            Parts(
                job=self._job,
                rank=self._rank,
                replica=self._replica,
                stream=self._stream,
                machine=self._machine,
                exchange=self._exchange,
                sidecar=self._sidecar,
                reporter=self._reporter,
                inbox=self._inbox,
                refusals=self._refusals,
                training_set_samples=self._companions.training_set_samples,
                worker_count=len(self._job.workers()),
            ),
            progress=self._progress,
            checkpointer=self._saving.checkpointer,
            has_barrier=has_barrier(self._job.spec),
            external_stop=self._stopped,
            interrupted=self._is_interrupted,
            after_step=self._after_step,
        )
        self._companions.start()
        while (reason := self._loop.run()) is None:
            self._come_in_anew()
        return reason

    def _come_in_anew(self) -> None:
        """Others train and it is not level with them: as after a restart. Its policies keep
        what they knew only where it goes on from its own weights, but for what lasts."""
        before, self._machine = self._machine, self._machine.anew()
        self._loop.begin_anew(self._machine)
        self._inbox.begin_anew(self._progress.iteration)
        self._exchange.renew_links("comes in anew: others trained meanwhile")
        snapshot = None
        with suppress(Interrupted):  # the loop finds out why
            snapshot = self._come_in(comes_back=True)
        if snapshot is None:
            self._machine.restore(before.state())

    def _is_interrupted(self) -> bool:
        return self._signals.reason is not None

    def _stopped(self) -> str | None:
        if (failure := self._coordination.failure()) is not None:
            raise failure
        return self._signals.reason or self._coordination.stop_reason()

    def _after_step(self, progress: JobProgress) -> None:
        if self._schedule.due(progress):
            self._evaluate()
        if self._saving.checkpointer.due():
            self._saving.save()

    def _evaluate(self) -> None:
        """By the evaluator of the run where there is one, else in a thread of this process."""
        if not self._config.snapshots_dir:
            self._evaluator.submit(self._tag())
            return
        weights_D, state_S = self._replica.model.get_weights(), self._replica.model.get_state()
        replica = handover.Replica(self._rank, *self._tag(), weights_D, state_S)
        try:
            handover.put_down(Path(self._config.snapshots_dir), replica)
        except OSError as error:
            self._evaluation_failed(error)

    def _tag(self) -> tuple[int, int, float]:
        return self._progress.iteration, self._progress.own_samples, self._reporter.now_s()

    def _report(self, reason: EventReason, message: str, warning: bool) -> None:
        iteration = self._progress.iteration
        self._reporter.event(reason, message, iteration=iteration, warning=warning)

    def _evaluated(self, result: Evaluated) -> None:
        self._reporter.evaluation(result, final=False)

    def _evaluation_failed(self, error: Exception) -> None:
        self._reporter.event(EventReason.EVALUATION_FAILED, str(error), warning=True)

    def _finish(self, reason: str) -> None:
        done = self._progress
        self._neighbourhood.widen(iteration_s=done.trained_s / max(1, done.iteration))
        self._companions.close()
        self._evaluator.close()
        final = self._evaluator.evaluate_all(self._tag())
        self._reporter.evaluation(final, final=True)
        self._loop.report_links(now=True)  # before peers leave, and their links with them
        finale = Finale(
            job=self._job,
            rank=self._rank,
            exchange=self._exchange,
            inbox=self._inbox,
            reporter=self._reporter,
            accuracy_of=self._accuracy_of,
            save=self._save,
            interrupted=self._is_interrupted,
            missing=self._neighbourhood.missing,
            kept=self._saving.keep_model,
        )
        own = Replica(
            self._rank, self._replica.state(), self._progress.own_samples, self._progress.iteration
        )
        results_dir = Path(self._config.results_dir)
        self._held = finale.run(own, results_dir=results_dir, stop_reason=reason)
        self._loop.report_links(now=True)  # peers that took longer have had it all by now

    def _accuracy_of(self, state: WorkerState) -> float:
        snapshot = self._replica.snapshot_of(state)
        return self._evaluator.evaluate_all(None, snapshot=snapshot).evaluation.accuracy

    def _save(self, path: Path, state: WorkerState) -> None:
        self._replica.model.save_keras(path, snapshot=self._replica.snapshot_of(state))
