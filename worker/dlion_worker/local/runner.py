"""`dlion run` without its terminal: starts every worker's processes and sees them to their end.

Called by the command line, which brings the coordinator (the operator's part) and says where
records go. Owns the order: environment, coordinator, configurations, processes, quotas when a
worker is ready, and, whatever happens, nothing left behind. Knows no terminal and no TensorFlow.
"""

from __future__ import annotations

import logging
import queue
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from dlion_api.errors import DLionError, UnavailableError
from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank, WorkerIdentity
from dlion_api.progress import EventRecord, ProgressRecord
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_api.worker_config import WorkerConfig
from dlion_worker.coordination import forget_membership
from dlion_worker.environments.change_words import change_in_words
from dlion_worker.environments.plan import Change, Plan
from dlion_worker.kept_credentials import forget_credentials
from dlion_worker.local.companions import Companion, Companions
from dlion_worker.local.coordinator import Coordinator
from dlion_worker.local.evaluating import NAME, SharedEvaluator
from dlion_worker.local.held_signals import HeldSignals
from dlion_worker.local.imposed import ImposedEnvironment
from dlion_worker.local.kernels import compile_kernels
from dlion_worker.local.measuring import Comparison
from dlion_worker.local.outcome import Failure, RunOutcome, how_it_failed
from dlion_worker.local.processes import ProcessGroup
from dlion_worker.local.restarts import Restarts

log = logging.getLogger(__name__)

POLL_S = 0.1
FOLDER_EVERY_S = 1.0
"""So often it is looked whether the result folder is still there."""
STOP_GRACE_S = 3.0
"""From the first signal to the last SIGKILL: Ctrl-C ends everything within five seconds."""
FINISH_WITHIN_S = 60.0
"""What workers have to save what they trained when the run is given up."""

Findings = Callable[[tuple[Comparison, ...], tuple[str, ...]], None]
"""Takes what the environment asked for beside what came of it, and notes on how it is imposed."""


class LocalRunner:
    """One run of a job on this machine."""

    def __init__(
        self,
        *,
        job: Job,
        plan: Plan,
        coordinator: Coordinator,
        results_dir: Path,
        data_root: Path,
        on_record: Callable[[ProgressRecord], None],
        program_root: Path | None = None,
        resume: bool = False,
        elapsed_s: float = 0.0,
        privileged: bool | None = None,
        measure_links: bool = True,
        on_environment: Findings | None = None,
        check_folder: Callable[[], None] = lambda: None,
    ) -> None:
        """`program_root`: where the manifest's own program is looked up (None: in the data root).
        `elapsed_s`: how long the run that is resumed had gone on, by its records' clock.
        `on_environment` is called when the environment stands and, however the run ends, when it
        is taken away. `check_folder` raises StorageError where the result folder is gone.
        """
        self._job = job
        self._plan = plan
        self._coordinator = coordinator
        self._results_dir = results_dir
        self._data_root = data_root
        self._program_root = program_root
        self._on_record = on_record
        self._resume = resume
        self._start_s = time.monotonic() - elapsed_s
        self._privileged = privileged
        self._measure_links = measure_links
        self._on_environment = on_environment or (lambda _comparisons, _notes: None)
        self._check_folder, self._folder_due_s = check_folder, 0.0
        self._is_ending = False
        self._conditions = plan.initial
        self._finish_by_s = float("inf")
        self._problems: list[str] = []
        self._records: queue.SimpleQueue[ProgressRecord] = queue.SimpleQueue()
        self._training_began_s: float | None = None
        self._running = {worker.rank for worker in job.workers()}
        self._comparisons: tuple[Comparison, ...] = ()
        self._failed: dict[Rank, Failure] = {}
        self._fatal: ExitCode | None = None

    def record(self, record: ProgressRecord) -> None:
        """Takes a record from the coordinator, on any thread."""
        self._records.put(record)

    @property
    def has_failed(self) -> bool:
        """Whether the run cannot succeed any more."""
        return self._fatal is not None

    @property
    def is_over(self) -> bool:
        """Whether all workers have come to their end by themselves."""
        return not self._running

    def run(self) -> RunOutcome:
        """Runs to the end. On `KeyboardInterrupt` all is ended in order, then it is raised."""
        compile_kernels()
        with HeldSignals() as signals:
            work_dir = Path(tempfile.mkdtemp(prefix="dlion-"))
            take = self._coordinator.take
            self._evaluator = SharedEvaluator(self._job, self._plan, work_dir, take)
            group = ProcessGroup(self._results_dir)
            self._began_s = time.monotonic()
            self._companions = Companions(group, self._tell)
            self._restarts = Restarts(self._tell)
            environment = ImposedEnvironment(
                self._plan, run_id=work_dir.name, work_dir=work_dir, privileged=self._privileged
            )
            try:
                with signals.let_through():
                    environment.start()
                try:
                    with signals.let_through():
                        self._on_environment((), environment.notes)
                        if self._measure_links and self._plan.shapes_links:
                            environment.measure_links()
                        self._start(environment, group, work_dir)
                        self._watch(environment, group)
                finally:
                    self._end(environment, group)
            finally:
                environment.close()
                shutil.rmtree(work_dir, ignore_errors=True)
            return self.outcome()

    def outcome(self) -> RunOutcome:
        """How it ended, or what is known of that where it was interrupted."""
        return RunOutcome(self._exit_code(), self._failed, self._comparisons, tuple(self._problems))

    def _end(self, environment: ImposedEnvironment, group: ProcessGroup) -> None:
        """Notes what came of the environment. Nobody is left; what they said last is recorded."""
        with suppress(OSError):  # a full disk: processes are to end all the same
            self._drain(environment)
        self._is_ending = True
        self._comparisons = _measured(environment)
        codes = group.poll()
        group.close(STOP_GRACE_S)
        environment.close()
        for worker in self._job.workers():
            forget_credentials(self._state_dir(worker.rank))
        self._drain(environment)
        self._note_ends(group, codes)
        if self._has_folder():
            self._on_environment(self._comparisons, environment.notes)

    # ---- starting ------------------------------------------------------------------------------

    def _start(self, environment: ImposedEnvironment, group: ProcessGroup, work_dir: Path) -> None:
        address = self._coordinator.start(environment.coordinator_host())
        for worker in self._job.workers():
            config_path = self._write_config(worker, environment, work_dir, address)
            if worker.rank == 0 and self._evaluator.folder is not None:
                evaluate = partial(self._evaluator.start, group, config_path)
                evaluator = Companion(NAME, EventReason.EVALUATOR_ENDED, evaluate)
                self._companions.start(evaluator, time.monotonic())
            sidecar = [sys.executable, "-m", "dlion_worker.sidecar", "--config", str(config_path)]
            supervisor = [
                sys.executable, "-m", "dlion_worker.supervisor", "--config", str(config_path),
            ]  # fmt: skip
            rank = worker.rank
            # What libraries and programs leave behind of temporary files goes with the run.
            env = {"TMPDIR": str(work_dir)}
            enter_sidecar = environment.sidecar_prefix(rank)
            enter = environment.command_prefix(rank)
            name = f"sidecar-{rank}"
            start = partial(group.start, name, sidecar, env=env, enter=enter_sidecar)
            self._companions.start(
                Companion(name, EventReason.SIDECAR_ENDED, start, rank), time.monotonic()
            )
            self._restarts.watch(rank, group.log_path(f"worker-{rank}"))
            # Where this process is killed the trainer still saves its checkpoint.
            group.start(f"worker-{rank}", supervisor, env=env, enter=enter, dies_by=signal.SIGTERM)

    def _write_config(
        self,
        worker: WorkerIdentity,
        environment: ImposedEnvironment,
        work_dir: Path,
        coordinator_address: str,
    ) -> Path:
        rank = worker.rank
        folder = work_dir / f"w{rank}"
        folder.mkdir()
        token_path = folder / "token"
        token_path.touch(mode=0o600)
        token_path.write_text(self._coordinator.token(worker))
        authority = self._coordinator.authority_pem()
        if authority is not None:
            (folder / "ca.pem").write_bytes(authority)
        state_dir = self._state_dir(rank)
        state_dir.mkdir(parents=True, exist_ok=True)
        forget_membership(state_dir)
        forget_credentials(state_dir)
        config = WorkerConfig(
            job_document=self._job.to_document(),
            rank=rank,
            coordinator_address=coordinator_address,
            authority_pem_path="" if authority is None else str(folder / "ca.pem"),
            token_path=str(token_path),
            state_dir=str(state_dir),
            socket_path=str(folder / "sidecar.sock"),
            listen_host=environment.listen_host(rank),
            advertise_host=environment.advertise_host(rank),
            exchange_port=environment.exchange_port(rank),
            measuring_port=environment.measuring_port(rank),
            data_root=str(self._data_root),
            results_dir=str(self._results_dir),
            program_root=str(self._program_root or ""),
            snapshots_dir=str(self._evaluator.folder or ""),
            cpu_quota_cores=self._plan.initial.worker(rank).quota_cores,
            link_addresses=environment.link_addresses(rank),
            start_time_monotonic_s=self._start_s,
            resume=self._resume,
        )
        config.save(folder / "config.json")
        return folder / "config.json"

    def _state_dir(self, rank: Rank) -> Path:
        return self._results_dir / "state" / f"w{rank}"

    # ---- watching ------------------------------------------------------------------------------

    def _watch(self, environment: ImposedEnvironment, group: ProcessGroup) -> None:
        while self._running:
            self._evaluator.poll()
            self._drain(environment)
            self._restarts.poll()
            self._look_for_the_folder(time.monotonic())
            self._note_ends(group, group.poll())
            if broken := environment.failure():
                self._tell(Rank(0), EventReason.ENVIRONMENT_FAILED, broken)
                raise UnavailableError(f"the environment has failed: {broken}")
            self._check_limits(self._running)
            if self._fatal is not None and self._training_began_s is None:
                return  # nobody has trained: there is nothing to finish
            if self._running and time.monotonic() > self._finish_by_s:
                late = f"workers {', '.join(map(str, sorted(self._running)))}"
                self._problems.append(f"{late} had not finished {FINISH_WITHIN_S:g} s later")
                return
            time.sleep(POLL_S)

    def _note_ends(self, group: ProcessGroup, codes: Mapping[str, int | None]) -> None:
        for rank in sorted(self._running):
            if (code := codes.get(f"worker-{rank}")) is not None:
                self._worker_ended(rank, code, group.log_path(f"worker-{rank}"))
                self._running.discard(rank)

    def _look_for_the_folder(self, now_s: float) -> None:
        """Raises: StorageError."""
        if now_s >= self._folder_due_s:
            self._folder_due_s = now_s + FOLDER_EVERY_S
            self._check_folder()

    def _has_folder(self) -> bool:
        try:
            self._check_folder()
        except DLionError:
            return False
        return True

    def _check_limits(self, running: Collection[Rank]) -> None:
        """Restarts what ended beside the workers, and gives the run up where it must end."""
        now_s = time.monotonic()
        if lost := self._companions.poll(now_s, running):
            self._give_up(ExitCode.UNAVAILABLE, lost)
        limit_s = self._job.spec.active_deadline_seconds
        if limit_s is not None and now_s - self._began_s > limit_s:
            self._give_up(
                ExitCode.DEADLINE, f"the run took longer than activeDeadlineSeconds ({limit_s} s)"
            )

    def _give_up(self, code: ExitCode, problem: str) -> None:
        if self._fatal is not None:
            return
        self._fatal = code
        self._problems.append(problem)
        self._finish_by_s = time.monotonic() + FINISH_WITHIN_S
        self._coordinator.request_stop(problem)

    def _worker_ended(self, rank: Rank, code: int, log: Path) -> None:
        if code == ExitCode.OK:
            # A worker that is being restarted just now would wait for peers that are gone.
            self._coordinator.request_stop(f"worker {rank} has finished")
            return
        failure = how_it_failed(code, log)
        self._failed[rank] = failure
        self._tell(rank, EventReason.WORKER_FAILED, f"ended for good with {failure}")
        self._coordinator.lost(rank)
        if self._fatal is None and (reason := self._why_over()):
            self._fatal = failure.code
            self._coordinator.request_stop(f"worker {rank} has failed, and {reason}")

    def _why_over(self) -> str:
        """Why the run cannot go on without the workers that have failed; empty: it can."""
        spec = self._job.spec
        if self._training_began_s is None and spec.start_deadline_seconds is None:
            return "the others would wait for it (no startDeadlineSeconds)"
        if spec.failure_policy == "Fail":
            return "failurePolicy is Fail"
        alive = {w.site for w in self._job.workers() if w.rank not in self._failed}
        if len(alive) < spec.min_sites:
            return f"{len(alive)} sites are left (minSites {spec.min_sites})"
        return ""

    def _tell(self, rank: Rank, reason: EventReason, message: str) -> None:
        time_s = time.monotonic() - self._start_s
        self._on_record(EventRecord(time_s, rank, 0, reason, message, warning=True))

    def _drain(self, environment: ImposedEnvironment) -> None:
        while True:
            try:
                record = self._records.get_nowait()
            except queue.Empty:
                return
            if isinstance(record, EventRecord):
                if self._is_ending and record.reason == EventReason.WORKER_LOST:
                    continue  # no loss: this process ends it
                self._follow(record, environment)
            self._on_record(record)

    def _follow(self, record: EventRecord, environment: ImposedEnvironment) -> None:
        """Quotas hold while a worker trains, not while it imports TensorFlow or ends."""
        if record.reason == EventReason.WORKER_READY:
            environment.impose_quota(record.rank)
        elif record.reason == EventReason.TRAINING_STARTED and self._training_began_s is None:
            began_s = time.monotonic()
            self._training_began_s = began_s
            environment.start_changes(lambda: time.monotonic() - began_s, self._environment_changed)
        elif record.reason in {EventReason.TRAINING_STOPPED, EventReason.WORKER_LOST}:
            environment.lift_quota(record.rank)

    def _environment_changed(self, change: Change) -> None:
        """In the environment's thread."""
        time_s = time.monotonic() - self._start_s
        before, self._conditions = self._conditions, change.conditions
        for rank, words in change_in_words(before, change.conditions).items():
            self._records.put(EventRecord(time_s, rank, 0, EventReason.ENVIRONMENT_CHANGED, words))

    def _exit_code(self) -> ExitCode:
        code = self._fatal
        if code is None and len(self._failed) == len(self._job.workers()):
            code = next(iter(self._failed.values())).code
        # Workers that somebody else has told to end did so in order: that is to be judged.
        return ExitCode.OK if code in (None, ExitCode.INTERRUPTED) else code


def _measured(environment: ImposedEnvironment) -> tuple[Comparison, ...]:
    try:
        return tuple(environment.requested_and_measured())
    except (DLionError, OSError, ValueError) as error:  # it is what broke, or an answer was torn
        log.warning("what the environment gave could not be measured: %s", error)
        return ()
