"""A run with the pods of one site as processes, on loopback.

The operator's coordinator runs in this process. Keeper and workers are processes of
`dlion_worker.pod`, each with the mounts of its pod below its own folder. Every pod has an address
of 127.0.0.0/8, so that all use the same ports as in a cluster.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.names import KeeperIdentity, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.pod_config import PodConfig
from dlion_api.protocol.progress import EventRecord, ProgressRecord, StepRecord
from dlion_api.spec import Job, load_job
from dlion_operator.coordinator import CoordinatorServer, CoordinatorThread
from dlion_operator.pki.authority import CertificateAuthority, Tokens
from dlion_operator.pki.certificate_issuer import LIFE
from dlion_results.run_folder.events import read_events
from process_starter import POD, ForkedProgram, start

LONG_S = 240.0
UID = "u-1"
"""The UID of the DLionJob."""


class PodRun:
    """One run at one site; its pods start and stop."""

    def __init__(
        self,
        folder: Path,
        document: dict[str, Any],
        *,
        subnet: int,
        site: str = "",
        life: timedelta = LIFE,
    ) -> None:
        """`subnet` separates the addresses of tests that run in parallel. `site` is the first by
        default. `life` is that of certificates."""
        self.folder = folder
        self.job: Job = load_job(document).with_group_ranks()
        self.site = SiteName(site or self.job.spec.sites[0].name)
        self._subnet = subnet
        self.tokens = Tokens()
        is_open = self.job.spec.tls.mode == "Disabled"
        self.authorities = (
            {} if is_open else {self.site: CertificateAuthority(self.site, life=life)}
        )
        self.processes: dict[str, subprocess.Popen[bytes] | ForkedProgram] = {}
        self._keeper_log_chars = 0
        """The log length of the keeper's earlier lives."""
        self.environment: dict[str, str] = {}
        """Additional variables of every process."""
        self.progress_records: list[ProgressRecord] = []
        """The records that workers have reported to the coordinator."""
        self.coordinator_port = 0
        self.start_coordinator()

    # ---- coordinator -----------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        """Start the coordinator again, on the same port."""
        self._loop_server = CoordinatorServer(
            f"{self.address(100)}:{self.coordinator_port}", self.authorities.get(self.site)
        )
        self._loop_server.open(
            self.job,
            authorities=self.authorities,
            tokens=self.tokens,
            on_record=self.progress_records.append,
            job_uid=UID,
        )
        self.coordinator = CoordinatorThread(self._loop_server, self.job.key)
        self.coordinator_port = self.coordinator.start()

    def calls(self) -> Mapping[str, int]:
        """Calls of workers and keepers to the present coordinator, by name."""
        return dict(self._loop_server.service.calls)

    def scale(self, ranks: Sequence[int]) -> None:
        """Set the ranks of the run, as the operator does when a group's count has changed."""
        workers = [self.job.worker(Rank(rank)) for rank in ranks]

        async def say() -> None:
            self._loop_server.runs[self.job.key].expect(workers)

        asyncio.run_coroutine_threadsafe(say(), self.coordinator._loop).result()

    def stop(self, reason: str) -> None:
        """Ask the workers to end the run."""
        self.coordinator.stop(reason)

    def run_is_over(self, reason: str, *, succeeded: bool) -> None:
        """End the run, as the operator does when all workers have ended."""

        async def say() -> None:
            self._loop_server.runs[self.job.key].finish(reason, succeeded=succeeded)

        asyncio.run_coroutine_threadsafe(say(), self.coordinator._loop).result()

    # ---- pods ------------------------------------------------------------------------------------

    def address(self, host: int) -> str:
        """The address of a pod."""
        return f"127.77.{self._subnet}.{host}"

    @property
    def results(self) -> Path:
        """The run's folder on the keeper's claim."""
        return self.root("keeper") / "var/lib/dlion" / self.job.spec.run_id

    def root(self, name: str) -> Path:
        """The folder with that pod's mounts."""
        return self.folder / name

    def prepare(self, name: str, identity: WorkerIdentity | KeeperIdentity) -> Path:
        """Write what the operator and Kubernetes mount; existing files stay."""
        root = self.root(name)
        for path in (names.CONFIG_DIR, names.TOKEN_DIR, names.SHARED_DIR, names.STATE_DIR):
            (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        document = self.job.to_document()
        document["metadata"]["uid"] = UID
        config = PodConfig(
            document,
            str(self.site),
            f"{self.address(100)}:{self.coordinator_port}",
            f"{self.address(101)}:{names.KEEPER_PORT}",
        )
        mounted = root / names.CONFIG_DIR.lstrip("/")
        (mounted / names.POD_CONFIG_KEY).write_text(config.to_json())
        if self.authorities:
            (mounted / names.AUTHORITY_KEY).write_bytes(self.coordinator.authority_pem)
        token = self.tokens.issue(identity, self.job.key)
        (root / names.TOKEN_DIR.lstrip("/") / names.TOKEN_FILE).write_text(token)
        return root

    def start_keeper(self) -> None:
        """Start the keeper's pod."""
        root = self.prepare("keeper", KeeperIdentity(self.site))
        if (self.folder / "keeper.log").exists():
            self._keeper_log_chars = len(self.log("keeper"))
        environment = {names.POD_IP_VARIABLE: self.address(101)}
        self._start("keeper", "keeper", root, environment, forked=not self.environment)

    def start_worker(self, rank: int) -> None:
        """Start both containers of that worker's pod."""
        worker = self.job.worker(Rank(rank))
        root = self.prepare(f"w{rank}", worker)
        environment = {
            names.GROUP_VARIABLE: worker.group,
            names.INDEX_VARIABLE: str(worker.index),
            names.POD_IP_VARIABLE: self.address(1 + rank),
        }
        forked = not self.environment
        self._start(f"sidecar-{rank}", "sidecar", root, environment, forked=forked)
        if forked:  # a trainer that has to import takes longer than the keeper's start
            self.wait_until(self._keeper_serves_or_is_away, "the keeper serves")
        self._start(f"trainer-{rank}", "trainer", root, environment, forked=forked)

    def _keeper_serves_or_is_away(self) -> bool:
        keeper = self.processes.get("keeper")
        is_away = keeper is None or keeper.poll() is not None
        return is_away or "storing the files of" in self.log("keeper")[self._keeper_log_chars :]

    def lose_worker(self, rank: int) -> None:
        """Delete its pod's emptyDirs, as when the pod is deleted."""
        shutil.rmtree(self.root(f"w{rank}"))

    def end(self, *which: str, number: signal.Signals = signal.SIGTERM) -> dict[str, int]:
        """Signal those processes and wait; return their exit codes."""
        for name in which:
            if self.processes[name].poll() is None:
                self.processes[name].send_signal(number)
        return {name: self.wait(name) for name in which}

    def wait(self, name: str, within_s: float = LONG_S) -> int:
        """Wait for that process; return its exit code."""
        try:
            return self.processes[name].wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} did not end\n{self.story()}") from None

    def _start(
        self,
        name: str,
        role: str,
        root: Path,
        environment: dict[str, str],
        *,
        enter: Sequence[str] = (),
        forked: bool = False,
    ) -> None:
        path = self.folder / f"{name}.log"
        arguments = [role, "--root", str(root)]
        arguments += ["--listen-host", environment[names.POD_IP_VARIABLE]]
        environment = {**os.environ, **self.environment, **environment}
        if forked:
            self.processes[name] = start(POD, arguments, environment, path)
            return
        command = [*enter, *names.BLOCK_SIGTERM_COMMAND, sys.executable, "-m", POD, *arguments]
        with path.open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log
            )

    # ---- results ---------------------------------------------------------------------------------

    def log(self, name: str) -> str:
        """The whole log of the process of that name, over its lives."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def records(self) -> list[ProgressRecord]:
        """The records of the keeper."""
        path = self.results / "events.jsonl"
        return list(read_events(path)) if path.exists() else []

    def steps(self, rank: int | None = None) -> list[StepRecord]:
        """Iterations, of one worker or of all."""
        steps = [record for record in self.records() if isinstance(record, StepRecord)]
        return [step for step in steps if rank in (None, step.rank)]

    def events(self, reason: str) -> list[EventRecord]:
        """Events of that reason."""
        return [r for r in self.records() if isinstance(r, EventRecord) and r.reason == reason]

    def summary(self) -> dict[str, Any]:
        """The figures of a completed run."""
        return dict(json.loads((self.results / "summary.json").read_text()))

    def wait_until(self, holds: Callable[[], object], what: str, within_s: float = LONG_S) -> None:
        """Wait until the condition holds; fail on a time-out."""
        deadline_s = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < deadline_s, f"timed out: {what}\n{self.story()}"
            time.sleep(0.1)

    def story(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"{p.name}: ...{p.read_text()[-1500:]}" for p in self.folder.glob("*.log"))


@contextmanager
def pod_run(
    folder: Path, document: dict[str, Any], *, subnet: int, life: timedelta = LIFE
) -> Iterator[PodRun]:
    """A run that has no pods yet; everything is removed afterwards."""
    run = PodRun(folder, document, subnet=subnet, life=life)
    try:
        yield run
    finally:
        for process in run.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        run.coordinator.close()
