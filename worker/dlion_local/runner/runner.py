"""Runs every process of a local job from start to end.

Called by `dlion run`, which supplies the coordinator and handles the records. Order: environment,
coordinator, configurations, processes, and a quota when a worker is ready. Everything is cleaned up
in any case. Uses no terminal and no TensorFlow.
"""

import logging
import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from dlion_api.errors import DLionError, UnavailableError
from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank, WorkerIdentity
from dlion_api.protocol.progress import EventRecord, ProgressRecord
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_api.spec.failures import end_of_exit, fail_run_cause
from dlion_environments.change_description import describe_change
from dlion_environments.plan import ConditionsChange, Plan
from dlion_environments.slow_exchange import slowest_link
from dlion_local.emulation.emulation import EmulatedEnvironment
from dlion_local.runner.auxiliary_processes import AuxiliaryProcess, AuxiliaryProcesses
from dlion_local.runner.deferred_signals import DeferredSignals
from dlion_local.runner.outcome import RunOutcome, WorkerFailure, read_failure
from dlion_local.runner.processes import ProcessGroup
from dlion_local.runner.restart_watcher import RestartWatcher
from dlion_local.runner.shared_evaluator import NAME, SharedEvaluator
from dlion_local.temporary_folder import remove_abandoned_folders, temporary_folder
from dlion_results.run_folder.environment import EnvironmentFigure
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

EnvironmentListener = Callable[[tuple[EnvironmentFigure, ...], tuple[str, ...]], None]
"""Receives requested and measured values, and notes on the backends."""


class RunCoordinator(Protocol):
    """The coordinator of one run, as the runner needs it; the operator implements it."""

    def start(self, host: str, start_time_monotonic_s: float) -> str:
        """Serve on that host at any port a run that began then. Return the address."""

    def token(self, worker: WorkerIdentity) -> str:
        """The token with which that worker authenticates."""

    def authority_pem(self) -> bytes | None:
        """The CA for its certificate; None: plain text."""

    def request_stop(self, reason: str) -> None:
        """Ask every worker to finish its iteration and end the run."""

    def lost(self, rank: Rank) -> None:
        """Mark a worker as permanently lost."""

    def take(self, record: ProgressRecord) -> None:
        """Accept a record that did not come in a worker's report."""


@dataclass(kw_only=True)
class LocalRunner:
    """One run of a job on this machine; nothing is started before `run`."""

    job: Job
    plan: Plan
    coordinator: RunCoordinator
    results_dir: Path
    data_root: Path
    on_record: Callable[[ProgressRecord], None]
    program_root: Path | None = None
    """Folder of the manifest's own program; None: the data root."""
    resume: bool = False
    elapsed_s: float = 0.0
    """Duration so far of a resumed run, on its records' clock."""
    privileged: bool | None = None
    on_environment: EnvironmentListener = lambda _figures, _notes: None
    """Called when the environment is set up, and again at the end of the run."""
    check_folder: Callable[[], None] = lambda: None
    """Raises StorageError if the result folder is missing."""

    def __post_init__(self) -> None:
        self._start_s = time.monotonic() - self.elapsed_s
        self._folder_due_s = 0.0
        self._ends_at_s = float("inf")
        self._conditions = self.plan.initial
        self._finish_by_s = float("inf")
        self._end_reason = ""
        self._problems: list[str] = []
        self._records: queue.SimpleQueue[ProgressRecord] = queue.SimpleQueue()
        self._training_began_s: float | None = None
        self._running = {worker.rank for worker in self.job.workers()}
        self._failed: dict[Rank, WorkerFailure] = {}
        self._quarantined: set[Rank] = set()
        self._fatal: ExitCode | None = None

    def record(self, record: ProgressRecord) -> None:
        """Accept a record from the coordinator. Thread-safe."""
        if getattr(record, "reason", "") == EventReason.TRAINING_STARTED:
            self._training_began_s = self._training_began_s or time.monotonic()
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
        with DeferredSignals() as signals, temporary_folder() as work_dir:
            remove_abandoned_folders()
            # Temporary files of libraries and programs are removed with the run.
            self._evaluator = SharedEvaluator(self.job, self.plan, work_dir, self.coordinator.take)
            self._group = ProcessGroup(self.results_dir, {"TMPDIR": str(work_dir)})
            self._began_s = time.monotonic()
            self._auxiliaries = AuxiliaryProcesses(self._group, self._warn)
            self._restarts = RestartWatcher(self._warn)
            self._environment = EmulatedEnvironment(
                self.plan, work_dir=work_dir, privileged=self.privileged
            )
            try:
                self._group.preload()  # links are set up and measured while it imports TensorFlow
                with signals.deliver():
                    self._environment.start()
                try:
                    with signals.deliver():
                        self.on_environment((), self._environment.notes)
                        if self.plan.shapes_links:
                            self._environment.measure_links()
                        self._start(work_dir)
                        self._watch()
                finally:
                    self._end()
            finally:
                self._group.close()
                self._environment.close()
            return self.outcome()

    def outcome(self) -> RunOutcome:
        """The result, as far as it is known if the run was interrupted."""
        return RunOutcome(self._exit_code(), self._failed, tuple(self._problems))

    def _end(self) -> None:
        """Measure the environment, end all processes, and only then record what has come: while
        they train, they may send records faster than they can be written."""
        self._ends_at_s = time.monotonic() - self._start_s
        figures = _measure(self._environment)
        codes = self._group.poll()
        for worker in self.job.workers():
            self._environment.remove_quota(worker.rank)  # it saves its state at full speed
        self._group.close(STOP_GRACE_S)
        self._environment.close()
        for worker in self.job.workers():
            delete_credentials(self._state_dir(worker.rank))
        while not self._records.empty():
            self._drain_records()
        self._record_exits(codes)
        try:
            self.check_folder()
        except DLionError:  # the folder is gone
            return
        self.on_environment(figures, self._environment.notes)

    # ---- starting ------------------------------------------------------------------------------

    def _start(self, work_dir: Path) -> None:
        host = self._environment.network.coordinator_host()
        address = self.coordinator.start(host, self._start_s)
        self._slowest_link = slowest_link(self.job, self.plan)
        configs = {
            worker.rank: str(self._write_config(worker, work_dir, address))
            for worker in self.job.workers()
        }
        for rank, config in configs.items():
            start = partial(
                self._group.fork,
                f"sidecar-{rank}",
                "dlion_worker.sidecar",
                ["--config", config],
                enter=self._environment.sidecar_arguments(rank),
            )
            sidecar = AuxiliaryProcess(f"sidecar-{rank}", EventReason.SIDECAR_ENDED, start, rank)
            self._auxiliaries.start(sidecar, time.monotonic())
        if self._evaluator.folder is not None:
            evaluate = partial(self._evaluator.start, self._group, configs[Rank(0)])
            evaluator = AuxiliaryProcess(NAME, EventReason.EVALUATOR_ENDED, evaluate)
            self._auxiliaries.start(evaluator, time.monotonic())
        for rank, config in configs.items():
            self._restarts.watch(rank, self._group.log_path(f"worker-{rank}"))
            self._group.fork(
                f"worker-{rank}",
                "dlion_worker.supervisor",
                ["--config", config],
                enter=self._environment.enter_arguments(rank),
            )

    def _write_config(self, worker: WorkerIdentity, work_dir: Path, address: str) -> Path:
        rank, network = worker.rank, self._environment.network
        folder = work_dir / f"w{rank}"
        folder.mkdir()
        token_path = folder / "token"
        token_path.touch(mode=0o600)
        token_path.write_text(self.coordinator.token(worker))
        if (authority := self.coordinator.authority_pem()) is not None:
            (folder / "ca.pem").write_bytes(authority)
        state_dir = self._state_dir(rank)
        state_dir.mkdir(parents=True, exist_ok=True)
        delete_membership(state_dir)
        delete_credentials(state_dir)
        config = WorkerConfig(
            job_document=self.job.to_document(),
            rank=rank,
            coordinator_address=address,
            authority_pem_path="" if authority is None else str(folder / "ca.pem"),
            token_path=str(token_path),
            state_dir=str(state_dir),
            socket_path=str(folder / "sidecar.sock"),
            listen_host=network.host(rank),
            advertise_host=network.host(rank),
            exchange_port=network.port(rank, "exchange"),
            measuring_port=network.port(rank, "measuring"),
            data_root=str(self.data_root),
            results_dir=str(self.results_dir),
            program_root=str(self.program_root or ""),
            snapshots_dir=str(self._evaluator.folder or ""),
            cpu_quota_cores=self.plan.initial.worker(rank).quota_cores,
            link_addresses=network.link_addresses(rank),
            slowest_link=self._slowest_link,
            start_time_monotonic_s=self._start_s,
            resume=self.resume,
        )
        config.save(folder / "config.json")
        return folder / "config.json"

    def _state_dir(self, rank: Rank) -> Path:
        return self.results_dir / "state" / f"w{rank}"

    # ---- watching ------------------------------------------------------------------------------

    def _watch(self) -> None:
        while self._running:
            self._evaluator.poll()
            self._drain_records()
            self._restarts.poll()
            if time.monotonic() >= self._folder_due_s:
                self._folder_due_s = time.monotonic() + FOLDER_CHECK_INTERVAL_S
                self.check_folder()
            self._record_exits(self._group.poll())
            if ended := self._group.failure():
                raise UnavailableError(ended)
            if broken := self._environment.failure():
                self._warn(Rank(0), EventReason.ENVIRONMENT_FAILED, broken)
                raise UnavailableError(f"the environment has failed: {broken}")
            self._check_limits()
            if self._fatal is not None and self._training_began_s is None:
                return  # no worker has trained, so there is nothing to save
            if self._running and time.monotonic() > self._finish_by_s:
                late = f"workers {', '.join(map(str, sorted(self._running)))}"
                after = f"{FINISH_TIMEOUT_S:g} s after the run's end: {self._end_reason}"
                self._problems.append(f"{late} had not finished {after}")
                return
            time.sleep(POLL_S)

    def _record_exits(self, codes: Mapping[str, int | None]) -> None:
        for rank in sorted(self._running):
            if (code := codes.get(f"worker-{rank}")) is not None:
                self._on_worker_exit(rank, code)
                self._running.discard(rank)

    def _check_limits(self) -> None:
        """Restart auxiliary processes, and end the run at its deadline."""
        now_s = time.monotonic()
        if lost := self._auxiliaries.poll(now_s, self._running):
            self._give_up(ExitCode.UNAVAILABLE, lost)
        limit_s = self.job.spec.active_deadline_seconds
        if limit_s is not None and now_s - self._began_s > limit_s:
            self._give_up(
                ExitCode.DEADLINE, f"the run took longer than activeDeadlineSeconds ({limit_s} s)"
            )

    def _give_up(self, code: ExitCode, problem: str) -> None:
        if self._fatal is None:
            self._problems.append(problem)
            self._end_early(code, problem)

    def _end_early(self, code: ExitCode, reason: str) -> None:
        self._fatal, self._end_reason = code, reason
        self._finish_by_s = time.monotonic() + FINISH_TIMEOUT_S
        self.coordinator.request_stop(reason)

    def _quarantine(self, rank: Rank) -> None:
        """End a worker that the coordinator no longer accepts: it would wait for a certificate."""
        self._quarantined.add(rank)
        self._group.kill(f"worker-{rank}")
        if self._fatal is None and (reason := self._lacking_workers()):
            self._give_up(ExitCode.UNAVAILABLE, f"worker {rank} is quarantined, and {reason}")

    def _on_worker_exit(self, rank: Rank, code: int) -> None:
        if rank in self._quarantined:
            return
        if code == ExitCode.OK:
            # A worker that is restarting now would wait for peers that have ended.
            self.coordinator.request_stop(f"worker {rank} has finished")
            return
        failure = read_failure(code, self._group.log_path(f"worker-{rank}"))
        self._failed[rank] = failure
        group = self.job.worker(rank).group
        rule = fail_run_cause(self.job.spec.failure_rules, end_of_exit(code), group)
        message = f"ended for good with {failure}{'; ' if rule else ''}{rule}"
        self._warn(rank, EventReason.WORKER_FAILED, message)
        self.coordinator.lost(rank)
        if self._fatal is None and (reason := rule or self._stop_cause()):
            self._end_early(failure.code, f"worker {rank} has failed, and {reason}")

    def _stop_cause(self) -> str:
        """Why the run cannot continue without the failed workers; empty if it can."""
        spec = self.job.spec
        if self._training_began_s is None and spec.start_deadline_seconds is None:
            return "the others would wait for it (no startDeadlineSeconds)"
        if spec.failure_policy == "Fail":
            return "failurePolicy is Fail"
        return self._lacking_workers()

    def _lacking_workers(self) -> str:
        """The reason if too few sites are left, or no worker that trains; empty if there are
        enough."""
        gone, min_sites = self._failed.keys() | self._quarantined, self.job.spec.min_sites
        left = {worker.site for worker in self.job.workers() if worker.rank not in gone}
        few = f"{len(left)} sites are left (minSites {min_sites})" if len(left) < min_sites else ""
        return few or self.job.spec.exchange.lacks_trainer(gone)

    def _warn(self, rank: Rank, reason: EventReason, message: str) -> None:
        time_s = time.monotonic() - self._start_s
        self.on_record(EventRecord(time_s, rank, 0, reason, message, warning=True))

    def _drain_records(self) -> None:
        for _ in range(self._records.qsize()):
            record = self._records.get_nowait()
            if isinstance(record, EventRecord):
                if record.reason == EventReason.WORKER_LOST and record.time_s > self._ends_at_s:
                    continue  # not a loss: this process ends it
                self._update_quota(record)
                if record.reason == EventReason.WORKER_QUARANTINED:
                    self._quarantine(record.rank)
            self.on_record(record)

    def _update_quota(self, record: EventRecord) -> None:
        """Apply quotas while a worker trains, not while it imports TensorFlow or ends."""
        if record.reason == EventReason.WORKER_READY:
            self._environment.apply_quota(record.rank)
        elif (began_s := self._training_began_s) and record.reason == EventReason.TRAINING_STARTED:
            self._environment.start_changes(
                lambda: time.monotonic() - began_s, self._on_environment_change
            )
        elif record.reason in {EventReason.TRAINING_STOPPED, EventReason.WORKER_LOST}:
            self._environment.remove_quota(record.rank)

    def _on_environment_change(self, change: ConditionsChange) -> None:
        """Called in the environment's thread."""
        time_s = time.monotonic() - self._start_s
        before, self._conditions = self._conditions, change.conditions
        for rank, text in describe_change(before, change.conditions).items():
            self._records.put(EventRecord(time_s, rank, 0, EventReason.ENVIRONMENT_CHANGED, text))

    def _exit_code(self) -> ExitCode:
        code = self._fatal
        lost = self._failed.keys() | self._quarantined
        if code is None and self._failed and len(lost) == len(self.job.workers()):
            code = next(iter(self._failed.values())).code
        # INTERRUPTED workers ended in order on request; the verdict decides on success.
        return ExitCode.OK if code in (None, ExitCode.INTERRUPTED) else code


def _measure(environment: EmulatedEnvironment) -> tuple[EnvironmentFigure, ...]:
    try:
        return tuple(environment.requested_and_measured())
    except (DLionError, OSError, ValueError) as error:  # the emulation failed, or its answer ended
        log.warning("the environment could not be measured: %s", error)
        return ()
