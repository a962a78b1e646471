"""An environment's plan, imposed on the processes of a local run: what `local.runner` uses.

Joins one way of shaping links (`namespaces` as root, else `relay`) with one way of holding CPU
(`quotas` by control group, else `duty_cycle`), starts the plan's changes when their time comes and
says what was asked for beside what came of it. Starts no worker: the runner puts
`command_prefix(rank)` before each supervisor's command and `sidecar_prefix(rank)` before each
sidecar's.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Protocol, Self

from dlion_api.errors import DLionError
from dlion_worker.local.duty_cycled_cpu import DutyCycledCpu
from dlion_worker.local.means import CpuMeans, LinkMeans, choose_cpu_means, choose_link_means
from dlion_worker.local.measuring import (
    Comparison,
    QuotaLedger,
    Transfer,
    compare_links,
    latencies_not_imposed,
    transfer,
)
from dlion_worker.local.namespaces import NamespaceNetwork
from dlion_worker.local.quotas import ControlGroupCpu
from dlion_worker.local.relay_network import RelayNetwork, UnshapedNetwork

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from dlion_api.names import Rank
    from dlion_worker.environments.plan import Change, Conditions, Plan


LINKS_MEASURED_ONCE = (
    "link rates: measured before the run, each worker to the next; those that changes bring are "
    "imposed and not measured, as a transfer would take them from the run"
)


class Network(Protocol):
    """What shapes links: a `NamespaceNetwork`, a `RelayNetwork` or an `UnshapedNetwork`."""

    def start(self) -> None: ...
    def apply(self, conditions: Conditions) -> None: ...
    def enter_arguments(self, rank: Rank) -> list[str]: ...
    def host(self, rank: Rank) -> str: ...
    def exchange_port(self, rank: Rank) -> int: ...
    def measuring_port(self, rank: Rank) -> int: ...
    def coordinator_host(self) -> str: ...
    def link_addresses(self, rank: Rank) -> dict[str, str]: ...
    def interface_bytes(self, rank: Rank) -> tuple[int, int]: ...
    def listener(self, rank: Rank) -> socket.socket: ...
    def dial(self, rank: Rank, peer: Rank, port: int) -> socket.socket: ...
    def failure(self) -> str: ...
    def close(self) -> None: ...


class Cpu(Protocol):
    """What holds CPU: `ControlGroupCpu` or `DutyCycledCpu`."""

    def start(self) -> None: ...
    def enter_arguments(self, rank: Rank) -> list[str]: ...
    def set_quota(self, rank: Rank, cores: float | None) -> None: ...
    def used_s(self, rank: Rank) -> float: ...
    def throttled_s(self, rank: Rank) -> float: ...
    def failure(self) -> str: ...
    def close(self) -> None: ...


class ImposedEnvironment:
    """A context manager: inside it the plan's links and quotas are in force.

    Use, in this order: enter; `coordinator_host()` to start the coordinator at; per worker
    `listen_host`, `advertise_host`, `exchange_port`, `measuring_port`, `link_addresses` for its
    configuration and the two prefixes for its commands; `impose_quota(rank)` when the worker is
    ready to train (before, it imports TensorFlow at full speed); `start_changes(clock)` when the
    run starts; `requested_and_measured()` before `close()`.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        run_id: str,
        work_dir: Path,
        privileged: bool | None = None,
    ) -> None:
        """`privileged`: False never uses root's means; True insists on them; None: where it may.

        With None, a plan that asks for latency goes through the relay even as root, as only the
        relay can impose latency on every kernel.
        """
        self.plan = plan
        self.run_id = run_id
        self._work_dir = work_dir
        self.link_means, self.link_reason = choose_link_means(plan, privileged)
        self.cpu_means, self.cpu_reason = choose_cpu_means(plan, privileged)
        self._network = self._build_network()
        self._cpu = self._build_cpu()
        self._conditions, self._conditions_since_s = plan.initial, 0.0
        self._ledgers = {worker.rank: QuotaLedger() for worker in plan.workers}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._changes: threading.Thread | None = None
        self._link_comparisons: list[Comparison] = []
        self._change_failure = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """By which means links and CPU are held, and why by these; what is not measured."""
        means = (
            f"links: {self.link_means} ({self.link_reason})",
            f"CPU: {self.cpu_means} ({self.cpu_reason})",
        )
        return (*means, LINKS_MEASURED_ONCE) if self.plan.changes_links else means

    def _build_network(self) -> Network:
        if self.link_means is LinkMeans.NAMESPACES:
            return NamespaceNetwork(self.plan)
        if self.link_means is LinkMeans.RELAY:
            return RelayNetwork(self.plan, self._work_dir)
        return UnshapedNetwork()

    def _build_cpu(self) -> Cpu | None:
        if self.cpu_means is CpuMeans.CONTROL_GROUP:
            return ControlGroupCpu([worker.rank for worker in self.plan.workers])
        if self.cpu_means is CpuMeans.DUTY_CYCLE:
            return DutyCycledCpu([worker.rank for worker in self.plan.workers], self._work_dir)
        return None

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """What entering does: for who calls `close` whatever comes of this."""
        try:
            self._network.start()
            if self._cpu is not None:
                self._cpu.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def command_prefix(self, rank: Rank) -> list[str]:
        """What to put before the supervisor's command: enters namespace and control group."""
        cpu = [] if self._cpu is None else self._cpu.enter_arguments(rank)
        return _enter_command([*self._network.enter_arguments(rank), *cpu])

    def sidecar_prefix(self, rank: Rank) -> list[str]:
        """What to put before the sidecar's command: the worker's links, but not its quota."""
        return _enter_command(self._network.enter_arguments(rank))

    def listen_host(self, rank: Rank) -> str:
        """The address at which the worker's servers listen."""
        return self._network.host(rank)

    def advertise_host(self, rank: Rank) -> str:
        """The address at which its peers reach the worker, where no relay stands between."""
        return self._network.host(rank)

    def exchange_port(self, rank: Rank) -> int:
        """The port at which the trainer's exchange must listen; 0: any free one."""
        return self._network.exchange_port(rank)

    def measuring_port(self, rank: Rank) -> int:
        """The port at which the sidecar must answer probes; 0: any free one."""
        return self._network.measuring_port(rank)

    def coordinator_host(self) -> str:
        """An address of the runner's own that every worker reaches, by no shaped link."""
        return self._network.coordinator_host()

    def link_addresses(self, rank: Rank) -> dict[str, str]:
        """Addresses to dial instead of the announced ones, for `WorkerConfig.link_addresses`.

        Keys are `"<peer rank>/exchange"` and `"<peer rank>/measuring"`; empty where the announced
        addresses are right.
        """
        return self._network.link_addresses(rank)

    def interface_bytes(self, rank: Rank) -> tuple[int, int]:
        """Bytes sent and received on the worker's links so far."""
        return self._network.interface_bytes(rank)

    def impose_quota(self, rank: Rank) -> None:
        """Hold the worker's trainer at its quota from now on.

        Doing so again changes nothing, and after `close` there is nothing to hold.
        """
        with self._lock:
            self._set_quota(rank, self._conditions.worker(rank).quota_cores)

    def lift_quota(self, rank: Rank) -> None:
        """Let the worker use the whole machine again, as while it imports TensorFlow anew."""
        with self._lock:
            self._set_quota(rank, None)

    def _set_quota(self, rank: Rank, cores: float | None) -> None:
        if self._cpu is None or self._ended.is_set():
            return
        used_s, throttled_s = self._cpu.used_s(rank), self._cpu.throttled_s(rank)
        self._ledgers[rank].note(
            cores, time.monotonic(), used_s, throttled_s, begins_s=self._conditions_since_s
        )
        self._cpu.set_quota(rank, cores)

    def start_changes(
        self, clock: Callable[[], float], on_change: Callable[[Change], None] | None = None
    ) -> None:
        """Impose each of the plan's changes when `clock()`, seconds of the run, says it is due.

        `on_change` is called, in a thread of this object's own, after each. One that cannot be
        imposed is the last: `failure` then says so.
        """
        if not self.plan.changes or self._changes is not None or self._ended.is_set():
            return
        self._changes = threading.Thread(
            target=self._impose_changes,
            args=(clock, on_change),
            name="environment-changes",
            daemon=True,
        )
        self._changes.start()

    def _impose_changes(
        self, clock: Callable[[], float], on_change: Callable[[Change], None] | None
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
                self._change_failure = f"the change at {change.time_s:g} s: {error}"
                return
            if on_change is not None:
                on_change(change)

    def apply(self, conditions: Conditions, *, since_s: float) -> None:
        """Put other rates, cuts and quotas in force at once, without breaking a connection.

        `since_s`, of the run: what the figures say of when these began.
        """
        with self._lock:
            if self._ended.is_set():
                return
            self._conditions, self._conditions_since_s = conditions, since_s
            self._network.apply(conditions)
            for rank, ledger in self._ledgers.items():
                if ledger.is_held:
                    self._set_quota(rank, conditions.worker(rank).quota_cores)

    def measure_links(self, seconds: float = 1.0) -> list[Comparison]:
        """Real transfers over the shaped links, each worker to the next, before the run starts.

        Takes about `seconds` and loads every link: call it while no worker exchanges yet.
        """
        self._link_comparisons = compare_links(self._network, self._conditions, seconds)
        return self._link_comparisons

    def transfer(self, pairs: Sequence[tuple[Rank, Rank]], seconds: float) -> list[Transfer]:
        """Real transfers over these links at once, for `benchmarks/network.py`."""
        return transfer(self._network, pairs, seconds)

    def requested_and_measured(self) -> list[Comparison]:
        """What was asked for beside what came of it, for the result folder.

        Links as `measure_links` found them; CPU over the time that each quota held, from one change
        to the next (a worker that waits for its peers uses less than its quota); and what was not
        imposed. Call it before `close`.
        """
        comparisons = list(self._link_comparisons)
        with self._lock:
            for rank, ledger in self._ledgers.items():
                if self._cpu is not None:
                    used_s, throttled_s = self._cpu.used_s(rank), self._cpu.throttled_s(rank)
                    ledger.look(time.monotonic(), used_s, throttled_s)
                    comparisons += ledger.compared(rank)
        if self.link_means is not LinkMeans.RELAY:
            comparisons += latencies_not_imposed(self.plan)
        return comparisons

    def failure(self) -> str:
        """What has broken of the environment itself, for the runner to end the run; else empty."""
        own = self._network.failure() or ("" if self._cpu is None else self._cpu.failure())
        return own or self._change_failure

    def close(self) -> None:
        """Take everything away again. Safe to call twice, and after a failed start."""
        with self._lock:
            self._ended.set()
        if self._changes is not None and self._changes is not threading.current_thread():
            self._changes.join(timeout=5)
        if self._cpu is not None:
            self._cpu.close()
        self._network.close()


def _enter_command(arguments: list[str]) -> list[str]:
    if not arguments:
        return []
    return [sys.executable, "-m", "dlion_worker.local.enter", *arguments, "--"]
