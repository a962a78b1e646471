"""Flux beside a real API server: its own definitions, and its controllers as processes.

The programs are built once from the Go module in `flux_controllers/`, into the testbed's cache
(testbed.binaries). Their definitions are put beside them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Self

from dlion_api.errors import UnavailableError
from operator_process import free_ports
from testbed.binaries import BuiltFolder, go, source_of

if TYPE_CHECKING:
    from types import TracebackType

    from testbed.kubectl import Kubectl

MODULE = Path(__file__).with_name("flux_controllers")
NAMESPACE = "flux-system"
CONTROLLERS = ("source-controller", "kustomize-controller", "helm-controller")
_START_TIMEOUT_S = 60.0


def _make(folder: Path) -> None:
    for name in CONTROLLERS:
        package = f"github.com/fluxcd/{name}"
        with tempfile.TemporaryDirectory(dir=folder) as made:
            go("build", "-trimpath", "-ldflags", "-s -w", "-o", made, package, module=MODULE)
            (Path(made) / name).rename(folder / name)
        for path in (source_of(package, MODULE) / "config/crd/bases").glob("*.yaml"):
            shutil.copyfile(path, folder / path.name)


_PROGRAMS = BuiltFolder("flux", MODULE, _make)
built, build = _PROGRAMS.built, _PROGRAMS.build


def install(folder: Path, kubectl: Kubectl) -> None:
    """Add its kinds and its namespace to the API server; `folder` is the result of `build`."""
    kubectl.run("create", "namespace", NAMESPACE)
    for path in sorted(folder.glob("*.yaml")):
        kubectl.run("apply", "--server-side", "-f", str(path))
    definitions = kubectl.run("get", "crd", "--output=name").split()
    kubectl.wait_until_known(*(each.partition("/")[2] for each in definitions))


class Flux:
    """Its controllers, for a whole cluster that knows its kinds; the context ends them."""

    def __init__(self, folder: Path, kubectl: Kubectl, work: Path) -> None:
        """`folder` is the result of `build`; artifacts and logs are kept in `work`."""
        self._folder, self._kubectl, self._work = folder, kubectl, work
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def check(self) -> None:
        """Raises: UnavailableError with the end of the log of a process that has ended."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise UnavailableError(f"{name} ended: {self._log(name).read_text()[-2000:]}")

    def _start(self) -> None:
        artifacts, *health = free_ports(1 + len(CONTROLLERS))
        store = self._work / "artifacts"
        store.mkdir()
        more = {
            "source-controller": [
                f"--storage-path={store}",
                f"--storage-addr=127.0.0.1:{artifacts}",
                f"--storage-adv-addr=127.0.0.1:{artifacts}",
            ]
        }
        environment = {
            **os.environ,
            "KUBECONFIG": str(self._kubectl.kubeconfig),
            "RUNTIME_NAMESPACE": NAMESPACE,
            "TMPDIR": str(self._work),
        }
        for name, port in zip(CONTROLLERS, health, strict=True):
            given = ["--metrics-addr=0", f"--health-addr=127.0.0.1:{port}", *more.get(name, ())]
            with self._log(name).open("ab") as log:
                self._processes[name] = subprocess.Popen(
                    [str(self._folder / name), *given], env=environment, stdout=log, stderr=log
                )
        for name, port in zip(CONTROLLERS, health, strict=True):
            self._wait_for(name, port)

    def _wait_for(self, name: str, port: int) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not _is_ready(port):
            self.check()
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"{name}: {self._log(name).read_text()[-2000:]}")
            time.sleep(0.1)

    def _end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _log(self, name: str) -> Path:
        return self._work / f"{name}.log"


def _is_ready(port: int) -> bool:
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer,
    ):
        return bool(answer.status == 200)
    return False
