"""The operator as a process beside a real API server: started, killed, observed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from dlion_api.errors import UnavailableError
from process_starter import OPERATOR, ForkedProgram, start

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from fault_proxy import FaultProxy
    from testbed.kubectl import Kubectl

START_TIMEOUT_S = 60.0
_PORTS = range(20_000, 30_000)
_CHANCE = random.SystemRandom()
_AS_IN_A_POD = """
mount -t tmpfs none /var/run
mkdir -p /var/run/secrets/kubernetes.io
ln -s "$0" /var/run/secrets/kubernetes.io/serviceaccount
exec "$@"
"""
"""Puts a folder where a pod has its account; the process itself becomes the operator."""
_WITH_ITS_CLOCK_AHEAD = """
import datetime, runpy, sys, time
ahead_s = float(sys.argv.pop(1))
seconds = time.time
time.time = lambda: seconds() + ahead_s
class Ahead(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=ahead_s)
datetime.datetime = Ahead
runpy.run_module("dlion_operator", run_name="__main__", alter_sys=True)
"""
"""Simulates a node whose clock is wrong: Python's clocks, but not that of TLS."""


@dataclass(frozen=True)
class Account:
    """A service account as a pod has it: a folder with a token that can be replaced (root)."""

    folder: Path
    address: str
    """`host:port` of the API server."""

    @classmethod
    def of(cls, kubectl: Kubectl, name: str, folder: Path) -> Self:
        """The account of that name in kubectl's namespace, with a token of one hour."""
        cluster = json.loads(kubectl.run("config", "view", "--raw", "--minify", "-o", "json"))
        about = cluster["clusters"][0]["cluster"]
        folder.mkdir()
        (folder / "ca.crt").write_bytes(base64.b64decode(about["certificate-authority-data"]))
        made = cls(folder, urlsplit(about["server"]).netloc)
        made.take(token_of(kubectl, name))
        return made

    @property
    def token(self) -> str:
        """The current token."""
        return (self.folder / "token").read_text()

    def take(self, token: str) -> None:
        """Replace the token, as a kubelet does."""
        new = self.folder / "token.new"
        new.write_text(token)
        new.rename(self.folder / "token")

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a pod finds its API server."""
        host, _, port = self.address.rpartition(":")
        return {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}


def token_of(kubectl: Kubectl, account: str, *, seconds: int = 3600) -> str:
    """A new token of a service account of kubectl's namespace."""
    return kubectl.run("create", "token", account, f"--duration={seconds}s").strip()


@dataclass
class OperatorProcess:
    """`python -m dlion_operator` with a kubeconfig or an account; a context that ends it."""

    folder: Path
    access: Path | Account
    site: str = "plant-a"
    namespaces: tuple[str, ...] = ()
    namespace: str = "default"
    """The operator's own namespace."""
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    clock_ahead_s: float = 0.0
    """The time by which its machine's clock is ahead."""

    def __post_init__(self) -> None:
        # Like a pod's name: a restarted operator holds its Leases at once.
        self.identity = f"{self.site}-{uuid.uuid4().hex[:8]}"
        self._process: subprocess.Popen[bytes] | ForkedProgram | None = None
        self._coordinator, self._metrics, self._health = free_ports(3)
        self.starts = 0

    @property
    def log(self) -> Path:
        """Its log, over all its starts."""
        return self.folder / "operator.log"

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def coordinator_address(self) -> str:
        """The address that workers connect to."""
        return f"127.0.0.1:{self._coordinator}"

    def start(self) -> None:
        """Start it; return when it is ready. Raises: UnavailableError with the end of its log."""
        self.launch()
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self.is_ready():
            if time.monotonic() > deadline_s or not self.is_running():
                raise UnavailableError(f"the operator did not get ready: {self.last_log_lines()}")
            time.sleep(0.05)

    def launch(self) -> None:
        """Start it without waiting."""
        config = self.folder / "operator.yaml"
        settings = {
            "site": self.site,
            "namespaces": list(self.namespaces),
            "images": {"worker": "dlion.test/worker:1", "sidecar": "dlion.test/sidecar:1"},
            "coordinator": {
                "port": self._coordinator,
                "address": self.coordinator_address,
            },
            "metricsPort": self._metrics,
            "healthPort": self._health,
            **self.settings,
        }
        config.write_text(json.dumps(settings))
        self.starts += 1
        environment = {
            **os.environ,
            "DLION_OPERATOR_IDENTITY": self.identity,
            **self.environment,
            **self._cluster_environment(),
        }
        program, arguments = self._command(config)
        if program is None:
            self._process = start(OPERATOR, arguments, environment, self.log)
            return
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*program, *arguments], stdout=log, stderr=log, env=environment
            )

    def _command(self, config: Path) -> tuple[list[str] | None, list[str]]:
        """The program and its arguments; the program is None if a forked one suffices."""
        arguments = [
            "--config", str(config), "--namespace", self.namespace, "--log-format", "json",
        ]  # fmt: skip
        python = [sys.executable, "-m", "dlion_operator"]
        if isinstance(self.access, Account):
            alone = ["unshare", "--mount", "--propagation=private", "sh", "-ec", _AS_IN_A_POD]
            return [*alone, str(self.access.folder), *python], arguments
        arguments += ["--kubeconfig", str(self.access)]
        if self.clock_ahead_s:
            ahead = [sys.executable, "-c", _WITH_ITS_CLOCK_AHEAD, str(self.clock_ahead_s)]
            return ahead, arguments
        return python if self.environment else None, arguments

    def _cluster_environment(self) -> dict[str, str]:
        if isinstance(self.access, Account):
            return {**self.access.environment, "KUBECONFIG": ""}
        return {}

    def is_ready(self) -> bool:
        """The answer of /readyz."""
        return self.get("readyz", self._health)[0] == 200

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Send SIGKILL; return when it is gone."""
        self.end(signal.SIGKILL)

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """End it by that signal; return its exit code."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        return self._process.wait(timeout_s)

    def last_log_lines(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    def get(self, path: str, port: int) -> tuple[int, str]:
        """Status and text of `http://127.0.0.1:PORT/PATH`; status 0 without an answer."""
        return http_get(f"http://127.0.0.1:{port}/{path}")

    def livez(self) -> tuple[int, str]:
        """The answer of /livez."""
        return self.get("livez", self._health)

    def metric(self, name: str) -> float:
        """The sum of the samples whose name and labels begin so; 0 if there is none."""
        return sum_of_samples(self.get("metrics", self._metrics)[1], name)

    def memory_mb(self) -> float:
        """Resident memory, MB."""
        return resident_mb(self.pid)

    def cpu_s(self) -> float:
        """CPU time so far, seconds."""
        return cpu_of(self.pid)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.is_running():
            self.end(signal.SIGKILL)


@contextlib.contextmanager
def proxied_operator(
    proxy: FaultProxy, kubectl: Kubectl, folder: Path
) -> Iterator[OperatorProcess]:
    """An operator for kubectl's namespace behind that proxy, with a keeper's claim.

    At the end it asserts that the operator reported no defect.
    """
    home = kubectl.namespace
    settings = {"keeper": {"size": "1Gi"}}
    with OperatorProcess(
        folder, proxy.kubeconfig, namespaces=(home,), namespace=home, settings=settings
    ) as process:
        yield process
        assert process.metric('dlion_operator_reconciles_total{result="defect"}') == 0


def http_get(url: str) -> tuple[int, str]:
    """Status and text of a URL; status 0 without an answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def sum_of_samples(metrics: str, name: str) -> float:
    """The sum of Prometheus' samples whose name and labels begin so; 0 if there is none."""
    lines = re.findall(rf"^{re.escape(name)}[^ ]* (.+)$", metrics, flags=re.MULTILINE)
    return sum(float(value) for value in lines)


def resident_mb(pid: int) -> float:
    """Resident memory of a process, MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1000


def cpu_of(pid: int) -> float:
    """CPU time of a process so far, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_ports(count: int) -> list[int]:
    """Return this number of free ports.

    The kernel gives none of them to a socket that asks for any port, which might be faster.
    """
    found: list[int] = []
    with contextlib.ExitStack() as closing:
        while len(found) < count:
            each, port = closing.enter_context(socket.socket()), _CHANCE.choice(_PORTS)
            with contextlib.suppress(OSError):  # it is in use
                each.bind(("127.0.0.1", port))
                found.append(port)
    return found
