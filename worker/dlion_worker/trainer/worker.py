"""One incarnation of one worker, from start to end.

Owns the order: data and model, credentials, links, admission, training, shutdown.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from secrets import randbits
from typing import Any

from dlion_api.endings import EndReport
from dlion_api.names import Rank
from dlion_api.protocol.membership import Membership
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_core.lifecycle.reporting import EvaluatedSnapshot, EvaluationResult, Reporter
from dlion_core.lifecycle.stopping import EvaluationSchedule, JobProgress
from dlion_core.links.events import StateSnapshot
from dlion_core.policies import factory
from dlion_core.policies.catalogue import has_barrier, local_optimizer
from dlion_worker.coordination import CoordinationClient, next_incarnation
from dlion_worker.evaluator import snapshot_files
from dlion_worker.evaluator.final_evaluations import ask_evaluator
from dlion_worker.once_per_key import OncePerKey
from dlion_worker.provenance.writer import ProvenanceWriter
from dlion_worker.security.credentials import WorkerCredentials
from dlion_worker.trainer import program_parts
from dlion_worker.trainer.admission import join_training
from dlion_worker.trainer.background.background_tasks import BackgroundTasks
from dlion_worker.trainer.background.certificate_renewal import (
    CertificateRenewer,
    initial_credentials,
)
from dlion_worker.trainer.background.peer_refusals import PeerRefusalReporter
from dlion_worker.trainer.background.sidecar_client import SidecarClient
from dlion_worker.trainer.background.speed_probing import compile_functions, measure_and_share_speed
from dlion_worker.trainer.end_report import end_report
from dlion_worker.trainer.loop import TrainerComponents, TrainingLoop
from dlion_worker.trainer.peer_selection import PeerSelection
from dlion_worker.trainer.process_times import ProcessPhase, ProcessTimes
from dlion_worker.trainer.saving import StateSaver
from dlion_worker.trainer.shutdown import Shutdown, announce_departure
from dlion_worker.trainer.signal_handler import Interrupted, SignalHandler
from dlion_worker.trainer.waiting_inbox import WaitingInbox
from dlion_worker.training import programs
from dlion_worker.training.checkpointing import Checkpointer
from dlion_worker.training.evaluation import Evaluator
from dlion_worker.training.keras_optimizer import make_optimizer
from dlion_worker.training.model import Snapshot
from dlion_worker.training.snapshot import TrainingState
from dlion_worker.training.staged.sensor import local_replica, local_stream
from dlion_worker.transport import PeerExchange, PeerExchangeConfig


class Worker:
    """Holds the parts of one incarnation. `run` trains to the end; `close` releases them."""

    def __init__(self, config: WorkerConfig, job: Job, signals: SignalHandler) -> None:
        self._times = ProcessTimes()
        self._config, self._job, self._signals = config, job, signals
        self._rank = Rank(config.rank)
        self._identity = job.worker(self._rank)
        self._progress, self._closing = JobProgress(), ExitStack()
        self._saved_ranks, self._evaluation_failures = tuple[Rank, ...](), OncePerKey()
        self._incarnation = next_incarnation(config.state_dir)
        self._sidecar = SidecarClient(config.socket_path)
        self._coordination = CoordinationClient(
            config,
            job=job.key,
            worker=self._identity,
            spec_hash=job.hash(),
            incarnation=self._incarnation,
        )
        self._members = self._coordination.membership
        self._is_restart = self._members() is not None
        self._inbox = WaitingInbox(
            lambda peer, message, epoch: self._exchange.send(peer, message, epoch), self._members
        )
        self._reporter = Reporter(
            rank=self._rank,
            incarnation=self._incarnation,
            start_monotonic_s=self._coordination.start_time_monotonic_s(),
            send=self._coordination.report,
            clock_s=time.monotonic,
        )
        self._refusals = PeerRefusalReporter(self._reporter, self._sidecar, self._progress)
        text = f"incarnation {self._incarnation} has imported TensorFlow"
        self._reporter.event(EventReason.TRAINER_IMPORTED, text)

    def run(self) -> str:
        """Load, train and save; return the stop reason.

        Raises: Interrupted before training and after saving; ModelLostError; DLionError; OSError.
        """
        self._load()
        self._times.enter(ProcessPhase.JOIN)
        credentials = initial_credentials(
            self._config,
            self._job,
            self._coordination,
            is_restart=self._is_restart,
            interrupted=self._signals.is_interrupted,
        )
        self._saving.connect(self._job.key, self._identity, self._incarnation, credentials)
        self._closing.callback(self._saving.close)
        if self._saving.resume(is_restart=self._is_restart):
            self._inbox.iteration = self._progress.iteration
        self._open_links(credentials)
        self._join(credentials)
        self._start_training()
        with self._signals.deferred():
            reason = self._train()
            self._times.enter(ProcessPhase.SAVE)
            if self._signals.is_interrupted():
                self._saving.save_final()
                if has_barrier(self._job.spec):
                    at = self._progress.iteration
                    announce_departure(self._exchange, self._inbox, reason, at)
                self._saving.wait_for_upload()
                self._training_ended()
                return reason
            self._report(EventReason.TRAINING_STOPPED, reason)
            self._saving.save()
        self._finish(reason)
        self._times.enter(ProcessPhase.SAVE)
        self._saving.check_model_uploaded()
        return reason

    def end_report(self, reason: str) -> EndReport:
        """Return this worker's report after an orderly end."""
        at, saved_ranks = self._progress.iteration, self._saved_ranks
        return end_report(reason, at, saved_ranks=saved_ranks, membership=self._members())

    def close(self, *, finished: bool) -> None:
        """Close links, threads and the coordinator's stream. `finished`: the worker is done."""
        self._times.enter(ProcessPhase.CLOSE)
        self._closing.close()
        self._reporter.process(self._times.seconds(), self._progress.iteration)
        self._coordination.close(finished=finished, interrupted=self._signals.is_interrupted)
        self._sidecar.close()

    def _load(self) -> None:
        self._times.enter(ProcessPhase.DATA)
        trainer, root = self._job.spec.trainer, Path(self._config.data_root)
        program = programs.load(trainer.program, directory=self._config.program_dir)
        self._data = program_parts.load_data(program, self._job, self._identity, self._config)
        self._reporter.near_duplicates(self._data.near_duplicates_left_out, kept=self._data.samples)
        self._times.enter(ProcessPhase.MODEL)
        model = program_parts.first_model(program, self._data, trainer, self._rank, root)
        self._provenance = ProvenanceWriter(
            self._job, self._rank, inbox=self._inbox, membership=self._members, data_root=root
        )
        self._stream = local_stream(self._job, self._rank, self._data, self._config.state_dir)
        optimizer = make_optimizer(model, local_optimizer(self._job.spec))
        if not self._is_restart:
            program_parts.report_notes(self._job, self._config, model, self._reporter)
        self._callbacks = program_parts.make_callbacks(
            model, self._config, self._identity, stream=self._stream, progress=self._progress
        )
        self._replica = local_replica(self._job, self._rank, model, optimizer, self._stream)
        self._replica.measure_on(self._data.held_out_x, self._data.held_out_y)
        self._machine = factory.build_for(self._job, self._rank, self._replica, randbits(64))
        self._saving = StateSaver(
            self._config,
            checkpointer=partial(
                Checkpointer,
                every_s=self._job.spec.checkpoint.every_seconds,
                replica=self._replica,
                progress=self._progress,
                stream=self._stream,
                machine=self._machine,
                workers=len(self._job.workers()),
            ),
            progress=self._progress,
            reporter=self._reporter,
        )
        compile_functions(model, self._stream)
        self._evaluator = Evaluator(
            model,
            self._data.held_out_x,
            self._data.held_out_y,
            seed=trainer.seed,
            max_samples=trainer.evaluation.max_samples,
            on_result=partial(self._reporter.evaluation, final=False),
            on_error=self._evaluation_failed,
            elsewhere=partial(
                ask_evaluator, self._config.snapshots_dir, model, check=self._signals.check
            ),
        )
        self._closing.callback(self._evaluator.close)

    def _open_links(self, credentials: WorkerCredentials) -> None:
        self._exchange = PeerExchange(
            PeerExchangeConfig.of(
                self._config,
                self._job,
                incarnation=self._incarnation,
                credentials=credentials,
                max_message_bytes=factory.max_message_bytes(self._job, self._replica.model.layout),
            ),
            on_event=self._refusals.filtered(self._inbox.put),
            state_provider=self._replica.snapshot_for,
        )
        self._closing.callback(self._exchange.close)
        self._exchange.start()
        self._peer_selection = PeerSelection(
            self._job, self._config, self._exchange, self._members, on_regroup=self._inbox.put
        )
        self._sidecar.on_directive(self._peer_selection.on_directive)
        self._sidecar.on_sent(self._exchange.count_probe)
        self._parts = TrainerComponents(
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
        )
        self._companions = BackgroundTasks(
            self._parts,
            self._config,
            data=self._data,
            progress=self._progress,
            peer_selection=self._peer_selection,
            coordination=self._coordination,
            credentials=credentials,
            on_saved=self._provenance.then(self._saving.upload_model),
        )
        self._closing.callback(self._companions.close)

    def _join(self, credentials: WorkerCredentials) -> None:
        renewing = CertificateRenewer(
            self._config,
            self._job.key,
            credentials=credentials,
            coordination=self._coordination,
            migrate_links=self._exchange.migrate_links,
            trust_changed=self._companions.send_peers,
            report=self._report,
        )
        self._coordination.join(
            self._exchange.address, self._sidecar.endpoint(), self._members_changed, renewing.trust
        )
        self._closing.callback(renewing.close)
        renewing.start()
        text = f"incarnation {self._incarnation} is ready to train"
        self._reporter.event(EventReason.WORKER_READY, text)

    def _members_changed(self, _: Membership) -> None:
        self._companions.send_peers()  # first: steps with a new peer begin once it is linked
        self._peer_selection.update()

    def _start_training(self) -> None:
        snapshot = self._join_run()
        self._saving.check_start()
        if self._inbox.stop_reason is None:
            self._report(EventReason.TRAINING_STARTED, f"linked workers: {len(self._inbox.linked)}")
        if snapshot is None:
            with self._times.during(ProcessPhase.SPEED):
                measure_and_share_speed(self._parts, self._stopped)

    def _join_run(self, *, is_rejoin: bool = False) -> StateSnapshot | None:
        """Join the run. Return a peer's state to adopt, or None to keep the own one."""
        selection = self._peer_selection
        neighbours = None if selection.is_all_to_all else selection.neighbours
        own = self._saving.may_keep_own
        with self._signals.immediate():
            snapshot = join_training(
                self._parts, self._stopped, self._members, neighbours, own, is_rejoin=is_rejoin
            )
        if snapshot is not None:
            batching = self._job.spec.batching
            self._saving.adopt(snapshot, batch_samples=batching.global_batch_size.initial)
        return snapshot

    def _train(self) -> str:
        self._schedule = EvaluationSchedule.of(self._job, self._rank, self._progress.job_samples)
        self._loop = TrainingLoop(
            self._parts,
            progress=self._progress,
            checkpointer=self._saving.checkpointer,
            external_stop=self._stopped,
            interrupted=self._signals.is_interrupted,
            after_step=self._after_step,
            training_set_samples=self._companions.training_set_samples,
            callbacks=self._callbacks,
        )
        self._companions.start()
        self._callbacks.training_begins()
        self._times.enter(ProcessPhase.TRAIN)
        self._reporter.process(self._times.seconds(), self._progress.iteration)
        while (reason := self._loop.run()) is None:
            self._rejoin()
        return reason

    def _rejoin(self) -> None:
        """Join again after the others trained without this worker.

        Policies keep their state only with the worker's own weights; permanent state always.
        """
        policies, self._machine = self._saving.checkpointer.policies(), self._machine.restarted()
        self._loop.reset(self._machine)
        self._inbox.reset(self._progress.iteration)
        self._exchange.reset_links("rejoins: others trained meanwhile")
        snapshot = None
        with suppress(Interrupted):  # the loop reads the reason
            snapshot = self._join_run(is_rejoin=True)
        if snapshot is None:
            self._machine.restore(policies)

    def _stopped(self) -> str | None:
        if (failure := self._coordination.failure()) is not None:
            raise failure
        return self._signals.reason or self._coordination.stop_reason()

    def _after_step(self, progress: JobProgress) -> None:
        if self._schedule.due(progress.job_samples, is_mid_round=self._machine.is_mid_round):
            self._evaluate()
        if self._saving.checkpointer.due():
            self._saving.save()

    def _evaluate(self) -> None:
        """Evaluate in the run's evaluator process if there is one, else in a thread here."""
        if not self._config.snapshots_dir:
            self._evaluator.submit(self._tag())
            return
        weights_D, state_S = self._replica.model.get_weights(), self._replica.model.get_state()
        replica = snapshot_files.ReplicaSnapshot(self._rank, *self._tag(), weights_D, state_S)
        try:
            snapshot_files.write_snapshot(Path(self._config.snapshots_dir), replica)
        except OSError as error:
            self._evaluation_failed(error)

    def _tag(self) -> tuple[int, int, float]:
        return self._progress.iteration, self._progress.own_samples, self._reporter.now_s()

    def _report(self, reason: EventReason, message: str, *, warning: bool = False) -> None:
        self._reporter.event(reason, message, iteration=self._progress.iteration, warning=warning)

    def _evaluation_failed(self, error: Exception) -> None:
        if self._evaluation_failures.is_new("", str(error)):  # on a full disk every one fails
            self._reporter.event(EventReason.EVALUATION_FAILED, str(error), warning=True)

    def _finish(self, reason: str) -> None:
        done = self._progress
        self._times.enter(ProcessPhase.EVALUATE)
        self._peer_selection.connect_all(iteration_s=done.trained_s / max(1, done.iteration))
        self._companions.close()
        self._evaluator.close()
        self._loop.report_links(now=True)  # before peers close their links
        own = self._replica.collected(iteration=done.iteration, samples=done.own_samples)
        snapshot, results_dir = self._replica.snapshot_of(own.state), Path(self._config.results_dir)
        tag = own.iteration, own.samples, self._reporter.now_s()
        with ThreadPoolExecutor(1, thread_name_prefix="final evaluation") as thread:
            evaluated = thread.submit(self._report_own, tag, snapshot)
            shutdown = Shutdown(
                job=self._job,
                rank=self._rank,
                exchange=self._exchange,
                inbox=self._inbox,
                reporter=self._reporter,
                accuracy_of=partial(self._accuracy_of, evaluated),
                save=self._replica.save,
                interrupted=self._signals.is_interrupted,
                missing=self._peer_selection.missing,
                enter=self._times.enter,
                on_saved=self._provenance.then(self._saving.upload_model_and_wait),
            )
            self._saved_ranks = shutdown.run(own, results_dir=results_dir, stop_reason=reason)
            self._times.enter(ProcessPhase.EVALUATE)
            own_result = evaluated.result()  # raises what it raised
        self._training_ended(own_result)

    def _training_ended(self, own_result: EvaluationResult | None = None) -> None:
        self._loop.report_links(now=True)  # slower peers have received everything by now
        self._times.enter(ProcessPhase.CLOSE)
        self._callbacks.training_ended(own_result)

    def _report_own(self, tag: tuple[int, int, float], snapshot: Snapshot) -> EvaluationResult:
        """Evaluate the own replica at the end, while those of peers are on their way."""
        found = self._evaluated(tag, snapshot)
        if self._job.spec.exchange.trains(self._rank):
            self._reporter.evaluation(found, final=True)
        return found.evaluation

    def _evaluated(self, tag: Any, snapshot: Snapshot) -> EvaluatedSnapshot:
        check = self._signals.check
        return self._evaluator.evaluate_all(tag, snapshot=snapshot, between_batches=check)

    def _accuracy_of(self, own: Future[Any], state: TrainingState) -> float:
        wait([own])  # it may be of the same weights
        return self._evaluated(None, self._replica.snapshot_of(state)).evaluation.accuracy
