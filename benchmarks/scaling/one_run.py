"""One run: a site starts, jobs are created, train, idle and change, and the operator restarts.

Every figure is of this one operator process, or of the API server's audit log.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from api_access import ApiAccess
from audit_log import AuditLog, by_kind, lags_s
from job_kind import JobKind, Operator, Workers
from scaled_site import SITE, job, scaled_site

from dlion_api.cluster_names import MANAGER
from dlion_api.errors import UnavailableError
from operator_process import OperatorProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from testbed.sites import Site

HERE = Path(__file__).parent
DLION_JOBS = JobKind(
    resource="dlionjobs",
    path="/apis/dlion.dev/v1alpha1/namespaces/default/dlionjobs",
    manifest=job,
    agents=(MANAGER,),
    passes='dlion_operator_reconciles_total{result="ok"}',
    defects='dlion_operator_reconciles_total{result="defect"}',
)
QUIET_S = 6.0
"""Seconds without a write by the operator until it counts as idle."""
CREATED_AT_ONCE = 8
PROBES_PER_S = 2.0
MIN_OPEN_FILES = 16_000
"""A connection of each worker has a file at both ends."""


@dataclass(frozen=True)
class Size:
    """The size of a run."""

    jobs: int = 1000
    workers: int = 5
    """Workers of each job."""
    rest_s: float = 65.0
    """It includes at least one round of lists (`kubernetes.resync`)."""
    probes: int = 120
    """Jobs that are changed while idle, one after the other, each once."""
    suspends: bool = False
    """Whether a change suspends the job."""
    within_s: float = 900.0
    """Limit until all of them train, and until the operator is idle."""


@dataclass
class Figures:
    """The measurements of one run."""

    size: dict[str, Any]
    load_average: list[float] = field(default_factory=list)
    """Load of the machine at the beginning of each part."""
    created_per_s: float = 0.0
    """Jobs per second, from the first manifest to the last created Job."""
    manifests_s: float = 0.0
    """Seconds in which the manifests were created."""
    all_train_s: float = 0.0
    """Seconds from the first manifest until the operator has written the last job's first training
    status and is idle."""
    create_cpu_s: float = 0.0
    """CPU of the operator until then."""
    create_requests: dict[str, int] = field(default_factory=dict)
    burst_lags_s: list[float] = field(default_factory=list)
    """Seconds from each manifest to the operator's first status write of it, in that time."""
    made_at_s: list[float] = field(default_factory=list)
    """When each Job was created, from the first manifest on."""
    rest_requests: dict[str, int] = field(default_factory=dict)
    rest_s: float = 0.0
    rest_core: float = 0.0
    """Share of one core at rest."""
    rest_mb: float = 0.0
    probe_lags_s: list[float] = field(default_factory=list)
    restart_s: float = 0.0
    """Seconds from the start of a new process until every worker has joined it, it made as many
    passes as there are jobs, and it has nothing left to write."""
    restart_ready_s: float = 0.0
    """Seconds until /readyz succeeds."""
    restart_cpu_s: float = 0.0
    restart_requests: dict[str, int] = field(default_factory=dict)
    peak_mb: float = 0.0
    """Maximum resident memory of both processes."""
    defects: float = 0.0
    refused: int = 0
    """Refused calls of workers."""

    @property
    def rest_requests_per_job_minute(self) -> float:
        """Return the operator's idle requests per job and minute, all included."""
        count = sum(self.rest_requests.values())
        return count / self.size["jobs"] * 60 / max(self.rest_s, 1e-9)


class Fleet:
    """The process of the simulated workers (`fleet`)."""

    def __init__(self, folder: Path, site: Site, operator: OperatorProcess) -> None:
        self._progress = folder / "progress.json"
        secret = site.kubectl.get("secret", "dlion-authority", "--namespace=default")
        authority = folder / "authority.pem"
        authority.write_bytes(base64.b64decode(secret["data"]["tls.crt"]))
        arguments = [
            site.kubeconfig, site.control_plane.folder / "service-account.key", authority,
            operator.coordinator_address, self._progress,
        ]  # fmt: skip
        self._log = (folder / "fleet.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fleet.py"), *map(str, arguments)],
            stdout=self._log,
            stderr=self._log,
        )

    def at_work(self) -> int:
        return self._read("joined")

    def described(self) -> str:
        return f"{self._read('pods')} pods run, {self._read('joined')} joined"

    def refused(self) -> int:
        return self._read("refused")

    def wait_for_loss(self) -> None:
        while self._read("joined"):
            time.sleep(0.1)

    def _read(self, what: str) -> int:
        """Return a number of its progress. Raises: UnavailableError if it has ended."""
        if self._process.poll() is not None:
            text = Path(self._log.name).read_text(errors="replace")[-2000:]
            raise UnavailableError(f"the workers' process has ended: {text}")
        try:
            return int(json.loads(self._progress.read_text())[what])
        except FileNotFoundError:
            return 0

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


class Run:
    """One run on a running site with an operator that is ready."""

    def __init__(
        self, size: Size, kind: JobKind, site: Site, operator: Operator, workers: Workers
    ) -> None:
        self._size, self._kind, self._site = size, kind, site
        self._operator, self._workers = operator, workers
        self._log = AuditLog(site.control_plane.audit_log, kind.agents)
        self.figures = Figures(asdict(size))

    def measure(self) -> Figures:
        """Run all parts in order. Raises: UnavailableError if one does not finish."""
        try:
            for part in (self._create, self._rest, self._restart, self._probe):
                self.figures.load_average.append(round(os.getloadavg()[0], 2))
                part()
                self._take_peak()
        finally:
            self.figures.refused = self._workers.refused()
            self._workers.close()
            self._log.close()
        self.figures.defects += self._defects()
        return self.figures

    def _create(self) -> None:
        figures, size = self.figures, self._size
        began_s, cpu_s = time.time(), self._operator.cpu_s()
        asyncio.run(_create_all(self._site.kubeconfig, size, self._kind))
        figures.manifests_s = time.time() - began_s
        _say(f"{size.jobs} manifests in {figures.manifests_s:.1f} s")
        self._until("all workers have joined", self._have_joined)
        self._until_at_rest()
        asked = self._log.asked
        first_s = min(each.received_s for each in asked if not each.by_operator)
        figures.made_at_s = sorted(
            each.answered_s - first_s
            for each in asked
            if each.by_operator
            and (each.verb, each.resource) == ("create", "jobs")
            and not each.dry_run
            and each.code < 300
        )
        if len(figures.made_at_s) < size.jobs:
            raise UnavailableError(f"{len(figures.made_at_s)} of {size.jobs} Jobs were made")
        figures.created_per_s = size.jobs / figures.made_at_s[-1]
        figures.all_train_s = max(each.answered_s for each in self._writes()) - first_s
        figures.create_cpu_s = self._operator.cpu_s() - cpu_s
        figures.create_requests = by_kind(asked)
        figures.burst_lags_s = lags_s(asked, verb="create", resource=self._kind.resource)
        _say(f"{figures.created_per_s:.1f} jobs/s, all train after {figures.all_train_s:.0f} s")

    def _rest(self) -> None:
        figures = self.figures
        before, cpu_s, began_s = len(self._log.read()), self._operator.cpu_s(), time.monotonic()
        time.sleep(self._size.rest_s)
        figures.rest_s = time.monotonic() - began_s
        figures.rest_core = (self._operator.cpu_s() - cpu_s) / figures.rest_s
        figures.rest_requests = by_kind(self._log.read()[before:])
        figures.rest_mb = self._operator.memory_mb()
        per_job = figures.rest_requests_per_job_minute
        _say(f"at rest {figures.rest_core:.0%} of a core, {figures.rest_mb:.0f} MB, "
             f"{per_job:.2f} requests per job and minute")  # fmt: skip

    def _probe(self) -> None:
        before = len(self._log.read())
        asyncio.run(_change_some(self._site.kubeconfig, self._size, self._kind))
        with contextlib.suppress(UnavailableError):  # some lags are then infinite
            self._until("every change is answered", self._are_answered(before), within_s=60)
        self.figures.probe_lags_s = self._lags_s(before)
        p50_s, p99_s = (quantile(self.figures.probe_lags_s, part) for part in (0.5, 0.99))
        _say(f"lag p50 {p50_s:.2f} s, p99 {p99_s:.2f} s")

    def _are_answered(self, before: int) -> Callable[[], bool]:
        def are() -> bool:
            self._log.read()
            found = self._lags_s(before)
            return len(found) >= min(self._size.probes, self._size.jobs) and max(found) < float(
                "inf"
            )

        return are

    def _lags_s(self, before: int) -> list[float]:
        return lags_s(self._log.asked[before:], verb="patch", resource=self._kind.resource)

    def _restart(self) -> None:
        figures, operator, size = self.figures, self._operator, self._size
        self._until_at_rest()
        figures.defects += self._defects()
        before = len(self._log.read())
        operator.kill()
        self._workers.wait_for_loss()
        began_s, wall_s = time.monotonic(), time.time()
        start(operator, size.within_s)
        figures.restart_ready_s = time.monotonic() - began_s
        self._until("all workers have joined again", self._have_joined, pause_s=0.25)
        self._until(
            "as many passes as jobs", lambda: operator.metric(self._kind.passes) >= size.jobs
        )
        steady_s = time.monotonic() - began_s
        self._until_at_rest()
        asked = self._log.asked[before:]
        writes = [each.answered_s - wall_s for each in asked if each.by_operator and each.writes]
        figures.restart_s = max([steady_s, *writes])
        figures.restart_cpu_s = operator.cpu_s()
        figures.restart_requests = by_kind(asked)
        _say(f"ready {figures.restart_ready_s:.1f} s, steady {figures.restart_s:.1f} s after a "
             "restart")  # fmt: skip

    def _have_joined(self) -> bool:
        return self._workers.at_work() == self._size.jobs * self._size.workers

    def _writes(self) -> list[Any]:
        return [each for each in self._log.read() if each.by_operator and each.writes]

    def _until_at_rest(self) -> None:
        def rests() -> bool:
            writes = self._writes()
            return not writes or time.time() - writes[-1].answered_s > QUIET_S

        self._until("the operator rests", rests)

    def _until(
        self, what: str, holds: Callable[[], bool], *, within_s: float = 0.0, pause_s: float = 0.5
    ) -> None:
        deadline_s = time.monotonic() + (within_s or self._size.within_s)
        while not holds():
            self._take_peak()
            if not self._operator.is_running():
                raise UnavailableError(f"the operator has ended: {self._operator.last_log_lines()}")
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"not in time: {what}; {self._workers.described()}")
            time.sleep(pause_s)

    def _take_peak(self) -> None:
        self.figures.peak_mb = max(self.figures.peak_mb, self._operator.memory_mb())

    def _defects(self) -> float:
        return self._operator.metric(self._kind.defects)


async def _create_all(kubeconfig: Path, size: Size, kind: JobKind) -> None:
    async with ApiAccess(kubeconfig, connections=CREATED_AT_ONCE) as api:
        numbers = iter(range(size.jobs))

        async def create() -> None:
            for number in numbers:
                await api.request("POST", kind.path, kind.manifest(number, size.workers))

        await asyncio.gather(*(create() for _ in range(CREATED_AT_ONCE)))


async def _change_some(kubeconfig: Path, size: Size, kind: JobKind) -> None:
    rng = random.Random(1)
    chosen = rng.sample(range(size.jobs), min(size.probes, size.jobs))
    async with ApiAccess(kubeconfig) as api:
        for count, number in enumerate(chosen):
            change = (
                {"suspend": True}
                if size.suspends
                # It affects only the generation in the status.
                else {"ttlSecondsAfterFinished": 100_000 + count}
            )
            path = f"{kind.path}/job-{number:04}"
            await api.request("PATCH", path, {"spec": change}, patch=True)
            await asyncio.sleep(1 / PROBES_PER_S)


def measure(size: Size, *, code: dict[str, str], definition: Path) -> Figures:
    """Run once from nothing. `code`: the environment by which Python finds the operator's code."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < MIN_OPEN_FILES and size.jobs * size.workers > MIN_OPEN_FILES / 4:
        raise UnavailableError(f"{most} open files allowed; needed: {MIN_OPEN_FILES} (ulimit -n)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with work_folder() as folder:
        pods = size.jobs * (size.workers + 1)  # and one keeper each
        with scaled_site(pods=pods) as (site, _):
            site.kubectl.run("create", "-f", str(definition))
            site.kubectl.wait_until_known("dlj")
            operator = OperatorProcess(
                folder,
                site.kubeconfig,
                site=SITE,
                environment={"DLION_SCALE": "1", **code},  # a separate Python, not a fork
            )
            try:
                start(operator, size.within_s)
                workers = Fleet(folder, site, operator)
                return Run(size, DLION_JOBS, site, operator, workers).measure()
            finally:
                if operator.is_running():
                    operator.kill()


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dlion-scale-") as folder:
        yield Path(folder)


def quantile(values: list[float], part: float) -> float:
    """Return the smallest value that this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")


def start(operator: Operator, within_s: float) -> None:
    """Start it and return when it is ready, which takes long on a busy machine.

    Raises: UnavailableError with the end of its log.
    """
    operator.launch()
    deadline_s = time.monotonic() + within_s
    while not operator.is_ready():
        if time.monotonic() > deadline_s or not operator.is_running():
            raise UnavailableError(f"the operator did not get ready: {operator.last_log_lines()}")
        time.sleep(0.05)


def _say(text: str) -> None:
    print(f"  {text}", flush=True)
