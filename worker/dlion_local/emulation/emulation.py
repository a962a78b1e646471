"""Emulates an environment's plan on the processes of a local run.

Combines a backend for links (`namespaces` as root, else `relay`) with one for CPU (`quotas` by
control group, else `duty_cycle`). Applies the plan's changes at their times and compares requested
with measured values. Starts no worker: each supervisor enters as `enter_arguments(rank)` specify,
and each sidecar as `sidecar_arguments(rank)`.
"""

import sys
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from dlion_api.errors import DLionError
from dlion_api.names import Rank
from dlion_environments.plan import Conditions, ConditionsChange, Plan
from dlion_local.emulation.compute.quotas import (
    ControlGroupCpu,
    DutyCycledCpu,
    control_groups_unavailable,
)
from dlion_local.emulation.measurement import QuotaUsage, compare_links, unsupported_latencies
from dlion_local.emulation.network.namespaces import NamespaceNetwork, namespaces_unavailable
from dlion_local.emulation.network.relay_network import RelayNetwork, UnshapedNetwork
from dlion_results.run_folder.environment import EnvironmentFigure


class LinkBackend(StrEnum):
    """How link rates are enforced."""

    NAMESPACES = "namespaces"
    RELAY = "relay"
    NONE = "none"


class CpuBackend(StrEnum):
    """How CPU quotas are enforced."""

    CONTROL_GROUP = "controlGroup"
    DUTY_CYCLE = "dutyCycle"
    NONE = "none"


def choose_link_backend(plan: Plan, privileged: bool | None) -> tuple[LinkBackend, str]:
    """Return the backend for links, and the reason for the choice."""
    if not plan.shapes_links:
        return LinkBackend.NONE, "the environment limits no link"
    if privileged is False:
        return LinkBackend.RELAY, "requested to run without root's features"
    unavailable = namespaces_unavailable()
    if privileged is None and plan.asks_for_latency:
        return LinkBackend.RELAY, "latency is asked for, which only the relay imposes"
    if unavailable and privileged is None:
        return LinkBackend.RELAY, unavailable
    return LinkBackend.NAMESPACES, "network namespaces with htb rates"


def choose_cpu_backend(plan: Plan, privileged: bool | None) -> tuple[CpuBackend, str]:
    """Return the backend for CPU quotas, and the reason for the choice."""
    if not plan.limits_cpu:
        return CpuBackend.NONE, "the environment limits no CPU"
    if privileged is False:
        return CpuBackend.DUTY_CYCLE, "requested to run without root's features"
    unavailable = control_groups_unavailable()
    if unavailable:
        return CpuBackend.DUTY_CYCLE, unavailable
    return CpuBackend.CONTROL_GROUP, "hard quota of the cpu controller"


LINKS_MEASURED_ONCE_NOTE = (
    "link rates: measured before the run, each worker to the next; those that changes bring are "
    "imposed and not measured, as a transfer would take them from the run"
)


CpuLimiter = ControlGroupCpu | DutyCycledCpu


class EmulatedEnvironment:
    """The plan's links and quotas, in force from `start` to `close`.

    Call order: start; start the coordinator at `network.coordinator_host()`; for each worker, use
    the addresses and ports of `network` in its configuration, and start its processes in it.
    Call `apply_quota(rank)` when the worker is ready to train, as before it imports TensorFlow at
    full speed. Call `start_changes(clock)` when the run starts, and `requested_and_measured()`
    before `close()`.
    """

    def __init__(self, plan: Plan, *, work_dir: Path, privileged: bool | None = None) -> None:
        """`privileged`: False never uses root's features, True requires them, None uses them if
        possible.

        With None, a plan with latency uses the relay even as root: only the relay emulates latency
        on every kernel.
        """
        self.plan = plan
        ranks = [worker.rank for worker in plan.workers]
        self.link_backend, self._link_reason = choose_link_backend(plan, privileged)
        self.network = UnshapedNetwork()
        if self.link_backend is LinkBackend.NAMESPACES:
            self.network = NamespaceNetwork(plan)
        elif self.link_backend is LinkBackend.RELAY:
            self.network = RelayNetwork(plan, work_dir)
        self.cpu_backend, self._cpu_reason = choose_cpu_backend(plan, privileged)
        self._cpu: CpuLimiter | None = None
        if self.cpu_backend is CpuBackend.CONTROL_GROUP:
            self._cpu = ControlGroupCpu(ranks)
        elif self.cpu_backend is CpuBackend.DUTY_CYCLE:
            self._cpu = DutyCycledCpu(ranks, work_dir)
        self._conditions, self._conditions_since_s = plan.initial, 0.0
        self._quota_usage = {rank: QuotaUsage() for rank in ranks}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._changes: threading.Thread | None = None
        self._link_figures: list[EnvironmentFigure] = []
        self._failure = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """The backends in use, why, and what is not measured."""
        means = (
            f"links: {self.link_backend} ({self._link_reason})",
            f"CPU: {self.cpu_backend} ({self._cpu_reason})",
        )
        return (*means, LINKS_MEASURED_ONCE_NOTE) if self.plan.changes_links else means

    def start(self) -> None:
        """Start the emulation. On an exception everything is removed."""
        try:
            self.network.start()
            if self._cpu is not None:
                self._cpu.start()
        except BaseException:
            self.close()
            raise

    def enter_arguments(self, rank: Rank) -> list[str]:
        """Flags of `network.enter` for the supervisor: the worker's links and quota."""
        cpu = [] if self._cpu is None else self._cpu.enter_arguments(rank)
        return [*self.network.enter_arguments(rank), *cpu]

    def sidecar_arguments(self, rank: Rank) -> list[str]:
        """Flags of `network.enter` for the sidecar: the worker's links, without its quota."""
        return self.network.enter_arguments(rank)

    def apply_quota(self, rank: Rank) -> None:
        """Enforce the quota of the worker's trainer from now on.

        Idempotent; does nothing after `close`. `failure` reports a quota that cannot be set.
        """
        with self._lock:
            self._set_quota(rank, self._conditions.worker(rank).quota_cores)

    def remove_quota(self, rank: Rank) -> None:
        """Remove the worker's quota, for example while it imports TensorFlow again."""
        with self._lock:
            self._set_quota(rank, None)

    def _set_quota(self, rank: Rank, cores: float | None) -> None:
        if self._cpu is None or self._ended.is_set():
            return
        try:
            usage_s, began_s = self._cpu.usage_s(rank), self._conditions_since_s
            self._quota_usage[rank].begin_quota(cores, time.monotonic(), *usage_s, begins_s=began_s)
            self._cpu.set_quota(rank, cores)
        except (DLionError, OSError) as error:
            # The caller may be ending the run: it has to end the workers in any case.
            self._failure = self._failure or f"the quota of worker {rank}: {error}"

    def start_changes(
        self,
        clock: Callable[[], float],
        on_change: Callable[[ConditionsChange], None] | None = None,
    ) -> None:
        """Apply each of the plan's changes when `clock()`, in seconds of the run, reaches its time.

        `on_change` is called after each, in a separate thread. If a change fails, no others follow
        and `failure` reports it.
        """
        if not self.plan.changes or self._changes is not None or self._ended.is_set():
            return
        self._changes = threading.Thread(
            target=self._apply_changes,
            args=(clock, on_change),
            name="environment-changes",
            daemon=True,
        )
        self._changes.start()

    def _apply_changes(
        self, clock: Callable[[], float], on_change: Callable[[ConditionsChange], None] | None
    ) -> None:
        for change in self.plan.changes:
            while (wait_s := change.time_s - clock()) > 0:
                if self._ended.wait(min(wait_s, 0.5)):
                    return
            if self._ended.is_set():
                return
            try:
                self.apply(change.conditions, since_s=change.time_s)
            except (DLionError, OSError) as error:
                self._failure = f"the change at {change.time_s:g} s: {error}"
                return
            if self._failure:  # of a quota
                return
            if on_change is not None:
                on_change(change)

    def apply(self, conditions: Conditions, *, since_s: float) -> None:
        """Apply rates, cuts and quotas at once; connections stay open.

        `since_s` is their start in the run's time, for the figures.
        """
        with self._lock:
            if self._ended.is_set():
                return
            self._conditions, self._conditions_since_s = conditions, since_s
            self.network.apply(conditions)
            for rank, usage in self._quota_usage.items():
                if usage.is_held:
                    self._set_quota(rank, conditions.worker(rank).quota_cores)

    def measure_links(self, seconds: float = 1.0) -> list[EnvironmentFigure]:
        """Measure link rates before the run, each worker sending to the next.

        Takes about `seconds` and loads every link: call it before workers exchange data.
        """
        self._link_figures = compare_links(self.network, self._conditions, seconds)
        return self._link_figures

    def requested_and_measured(self) -> list[EnvironmentFigure]:
        """Compare requested with measured values, for the result folder.

        Links as `measure_links` found them. CPU as the mean over the time of each quota; a worker
        that waits for peers uses less than its quota. Also lists what was not enforced. Call it
        before `close`.
        """
        figures = list(self._link_figures)
        with self._lock:
            for rank, usage in self._quota_usage.items():
                if self._cpu is not None:
                    usage_s = self._cpu.usage_s(rank)
                    usage.update(time.monotonic(), *usage_s)
                    figures += usage.figures(rank)
        if self.link_backend is not LinkBackend.RELAY:
            figures += unsupported_latencies(self.plan)
        return figures

    def failure(self) -> str:
        """Why the emulation itself has failed, so that the runner ends the run; else empty."""
        own = self.network.failure() or ("" if self._cpu is None else self._cpu.failure())
        return own or self._failure

    def close(self) -> None:
        """Remove everything. May be called twice, and after a failed start."""
        with self._lock:
            self._ended.set()
        if self._changes is not None and self._changes is not threading.current_thread():
            self._changes.join(timeout=5)
        if self._cpu is not None:
            self._cpu.close()
        self.network.close()


def enter_command(arguments: list[str]) -> list[str]:
    """Prefix of a command that enters as the arguments specify."""
    return [sys.executable, "-P", "-m", "dlion_local.emulation.network.enter", *arguments, "--"]
