"""Runs every process of a local job from start to end.

Called by `dlion run`, which supplies the coordinator and handles the records. Order: environment,
coordinator, configurations, processes, and a quota when a worker is ready. Everything is cleaned up
in any case. Uses no terminal and no TensorFlow.
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
from dlion_api.protocol.progress import EventRecord, ProgressRecord
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_environments.change_description import describe_change
from dlion_environments.plan import ConditionsChange, Plan
from dlion_local.emulation.emulation import EmulatedEnvironment
from dlion_local.runner.auxiliary_processes import AuxiliaryProcess, AuxiliaryProcesses
from dlion_local.runner.deferred_signals import DeferredSignals
from dlion_local.runner.kernel_compilation import compile_kernels
from dlion_local.runner.outcome import RunOutcome, WorkerFailure, read_failure
from dlion_local.runner.processes import ProcessGroup
from dlion_local.runner.restart_watcher import RestartWatcher
from dlion_local.runner.run_coordinator import RunCoordinator
from dlion_local.runner.shared_evaluator import NAME, SharedEvaluator
from dlion_results.run_folder.environment import Comparison
from dlion_worker.coordination import delete_membership
from dlion_worker.security.credential_store import delete_credentials

log = logging.getLogger(__name__)

POLL_S = 0.1
FOLDER_CHECK_INTERVAL_S = 1.0
"""Interval between checks that the result folder still exists."""
STOP_GRACE_S = 3.0
"""Time from the first signal to the last SIGKILL: Ctrl-C ends everything within five seconds."""
FINISH_TIMEOUT_S = 60.0
"""Time that workers have to save their results when the run is ended early."""

EnvironmentListener = Callable[[tuple[Comparison, ...], tuple[str, ...]], None]
"""Receives requested and measured values, and notes on the backends."""


class LocalRunner:
    """One run of a job on this machine."""

    def __init__(
        self,
        *,
        job: Job,
        plan: Plan,
        coordinator: RunCoordinator,
        results_dir: Path,
        data_root: Path,
        on_record: Callable[[ProgressRecord], None],
        program_root: Path | None = None,
        resume: bool = False,
        elapsed_s: float = 0.0,
        privileged: bool | None = None,
        measure_links: bool = True,
        on_environment: EnvironmentListener | None = None,
        check_folder: Callable[[], None] = lambda: None,
    ) -> None:
        """Set up a run; nothing is started yet.

        `program_root` is the folder of the manifest's own program (None: the data root).
        `elapsed_s` is the duration so far of a resumed run, on its records' clock. `on_environment`
        is called when the environment is set up, and again at the end of the run. `check_folder`
        raises StorageError if the result folder is missing.
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
        self._failed: dict[Rank, WorkerFailure] = {}
        self._fatal: ExitCode | None = None

    def record(self, record: ProgressRecord) -> None:
        """Accept a record from the coordinator. Thread-safe."""
        self._records.put(record)

    @property
    def has_failed(self) -> bool:
        """Whether the run can no longer succeed."""
        return self._fatal is not None

    @property
    def is_over(self) -> bool:
        """Whether all workers have ended by themselves."""
        return not self._running

    def run(self) -> RunOutcome:
        """Run to the end. On `KeyboardInterrupt` clean up, then raise it."""
        compile_kernels()
        with DeferredSignals() as signals:
            work_dir = Path(tempfile.mkdtemp(prefix="dlion-"))
            take = self._coordinator.take
            self._evaluator = SharedEvaluator(self._job, self._plan, work_dir, take)
            group = ProcessGroup(self._results_dir)
            self._began_s = time.monotonic()
            self._auxiliaries = AuxiliaryProcesses(group, self._warn)
            self._restarts = RestartWatcher(self._warn)
            environment = EmulatedEnvironment(
                self._plan, run_id=work_dir.name, work_dir=work_dir, privileged=self._privileged
            )
            try:
                with signals.deliver():
                    environment.start()
                try:
                    with signals.deliver():
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
        """The result, as far as it is known if the run was interrupted."""
        return RunOutcome(self._exit_code(), self._failed, self._comparisons, tuple(self._problems))

    def _end(self, environment: EmulatedEnvironment, group: ProcessGroup) -> None:
        """Measure the environment, end all processes, and record their last messages."""
        with suppress(OSError):  # the disk may be full; end the processes in any case
            self._drain_records(environment)
        self._is_ending = True
        self._comparisons = _measure(environment)
        codes = group.poll()
        for worker in self._job.workers():
            environment.remove_quota(worker.rank)  # workers save their state at full speed
        group.close(STOP_GRACE_S)
        environment.close()
        for worker in self._job.workers():
            delete_credentials(self._state_dir(worker.rank))
        self._drain_records(environment)
        self._record_exits(group, codes)
        if self._has_folder():
            self._on_environment(self._comparisons, environment.notes)

    # ---- starting ------------------------------------------------------------------------------

    def _start(self, environment: EmulatedEnvironment, group: ProcessGroup, work_dir: Path) -> None:
        address = self._coordinator.start(environment.coordinator_host())
        for worker in self._job.workers():
            config_path = self._write_config(worker, environment, work_dir, address)
            if worker.rank == 0 and self._evaluator.folder is not None:
                evaluate = partial(self._evaluator.start, group, config_path)
                evaluator = AuxiliaryProcess(NAME, EventReason.EVALUATOR_ENDED, evaluate)
                self._auxiliaries.start(evaluator, time.monotonic())
            sidecar = [sys.executable, "-m", "dlion_worker.sidecar", "--config", str(config_path)]
            supervisor = [
                sys.executable, "-m", "dlion_worker.supervisor", "--config", str(config_path),
            ]  # fmt: skip
            rank = worker.rank
            # Temporary files of libraries and programs are removed with the run.
            env = {"TMPDIR": str(work_dir)}
            sidecar_prefix = environment.sidecar_prefix(rank)
            prefix = environment.command_prefix(rank)
            name = f"sidecar-{rank}"
            start = partial(group.start, name, sidecar, env=env, prefix=sidecar_prefix)
            self._auxiliaries.start(
                AuxiliaryProcess(name, EventReason.SIDECAR_ENDED, start, rank), time.monotonic()
            )
            self._restarts.watch(rank, group.log_path(f"worker-{rank}"))
            # SIGTERM lets the trainer save its checkpoint if this process is killed.
            group.start(
                f"worker-{rank}",
                supervisor,
                env=env,
                prefix=prefix,
                parent_death_signal=signal.SIGTERM,
            )

    def _write_config(
        self,
        worker: WorkerIdentity,
        environment: EmulatedEnvironment,
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
        delete_membership(state_dir)
        delete_credentials(state_dir)
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

    def _watch(self, environment: EmulatedEnvironment, group: ProcessGroup) -> None:
        while self._running:
            self._evaluator.poll()
            self._drain_records(environment)
            self._restarts.poll()
            self._check_folder_when_due(time.monotonic())
            self._record_exits(group, group.poll())
            if broken := environment.failure():
                self._warn(Rank(0), EventReason.ENVIRONMENT_FAILED, broken)
                raise UnavailableError(f"the environment has failed: {broken}")
            self._check_limits(self._running)
            if self._fatal is not None and self._training_began_s is None:
                return  # no worker has trained, so there is nothing to save
            if self._running and time.monotonic() > self._finish_by_s:
                late = f"workers {', '.join(map(str, sorted(self._running)))}"
                self._problems.append(f"{late} had not finished {FINISH_TIMEOUT_S:g} s later")
                return
            time.sleep(POLL_S)

    def _record_exits(self, group: ProcessGroup, codes: Mapping[str, int | None]) -> None:
        for rank in sorted(self._running):
            if (code := codes.get(f"worker-{rank}")) is not None:
                self._on_worker_exit(rank, code, group.log_path(f"worker-{rank}"))
                self._running.discard(rank)

    def _check_folder_when_due(self, now_s: float) -> None:
        """Raises StorageError."""
        if now_s >= self._folder_due_s:
            self._folder_due_s = now_s + FOLDER_CHECK_INTERVAL_S
            self._check_folder()

    def _has_folder(self) -> bool:
        try:
            self._check_folder()
        except DLionError:
            return False
        return True

    def _check_limits(self, running: Collection[Rank]) -> None:
        """Restart auxiliary processes, and end the run at its deadline."""
        now_s = time.monotonic()
        if lost := self._auxiliaries.poll(now_s, running):
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
        self._finish_by_s = time.monotonic() + FINISH_TIMEOUT_S
        self._coordinator.request_stop(problem)

    def _on_worker_exit(self, rank: Rank, code: int, log: Path) -> None:
        if code == ExitCode.OK:
            # A worker that is restarting now would wait for peers that have ended.
            self._coordinator.request_stop(f"worker {rank} has finished")
            return
        failure = read_failure(code, log)
        self._failed[rank] = failure
        self._warn(rank, EventReason.WORKER_FAILED, f"ended for good with {failure}")
        self._coordinator.lost(rank)
        if self._fatal is None and (reason := self._stop_cause()):
            self._fatal = failure.code
            self._coordinator.request_stop(f"worker {rank} has failed, and {reason}")

    def _stop_cause(self) -> str:
        """Why the run cannot continue without the failed workers; empty if it can."""
        spec = self._job.spec
        if self._training_began_s is None and spec.start_deadline_seconds is None:
            return "the others would wait for it (no startDeadlineSeconds)"
        if spec.failure_policy == "Fail":
            return "failurePolicy is Fail"
        alive = {w.site for w in self._job.workers() if w.rank not in self._failed}
        if len(alive) < spec.min_sites:
            return f"{len(alive)} sites are left (minSites {spec.min_sites})"
        return ""

    def _warn(self, rank: Rank, reason: EventReason, message: str) -> None:
        time_s = time.monotonic() - self._start_s
        self._on_record(EventRecord(time_s, rank, 0, reason, message, warning=True))

    def _drain_records(self, environment: EmulatedEnvironment) -> None:
        while True:
            try:
                record = self._records.get_nowait()
            except queue.Empty:
                return
            if isinstance(record, EventRecord):
                if self._is_ending and record.reason == EventReason.WORKER_LOST:
                    continue  # not a loss: this process ends it
                self._update_quota(record, environment)
            self._on_record(record)

    def _update_quota(self, record: EventRecord, environment: EmulatedEnvironment) -> None:
        """Apply quotas while a worker trains, not while it imports TensorFlow or ends."""
        if record.reason == EventReason.WORKER_READY:
            environment.apply_quota(record.rank)
        elif record.reason == EventReason.TRAINING_STARTED and self._training_began_s is None:
            began_s = time.monotonic()
            self._training_began_s = began_s
            environment.start_changes(
                lambda: time.monotonic() - began_s, self._on_environment_change
            )
        elif record.reason in {EventReason.TRAINING_STOPPED, EventReason.WORKER_LOST}:
            environment.remove_quota(record.rank)

    def _on_environment_change(self, change: ConditionsChange) -> None:
        """Called in the environment's thread."""
        time_s = time.monotonic() - self._start_s
        before, self._conditions = self._conditions, change.conditions
        for rank, text in describe_change(before, change.conditions).items():
            self._records.put(EventRecord(time_s, rank, 0, EventReason.ENVIRONMENT_CHANGED, text))

    def _exit_code(self) -> ExitCode:
        code = self._fatal
        if code is None and len(self._failed) == len(self._job.workers()):
            code = next(iter(self._failed.values())).code
        # INTERRUPTED workers ended in order on request; the verdict decides on success.
        return ExitCode.OK if code in (None, ExitCode.INTERRUPTED) else code


def _measure(environment: EmulatedEnvironment) -> tuple[Comparison, ...]:
    try:
        return tuple(environment.requested_and_measured())
    except (
        DLionError,
        OSError,
        ValueError,
    ) as error:  # the emulation itself failed, or an answer was cut off
        log.warning("the environment could not be measured: %s", error)
        return ()
