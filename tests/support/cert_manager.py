"""cert-manager beside a real API server: its own definitions, and its controllers as a process.

The program is built once from the Go module in `cert_manager_controllers/`, into the testbed's
cache (testbed.binaries). Its definitions are put beside it.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

from dlion_api.errors import UnavailableError
from testbed.binaries import BuiltFolder, go, source_of

if TYPE_CHECKING:
    from types import TracebackType

    from testbed.kubectl import Kubectl

MODULE = Path(__file__).with_name("cert_manager_controllers")
NAME = "github.com/cert-manager/cert-manager"


def _make(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as made:
        go("build", "-trimpath", "-ldflags", "-s -w", "-o", made, ".", module=MODULE)
        (Path(made) / "cert-manager-controllers").rename(folder / "controllers")
    for path in (source_of(NAME, MODULE) / "deploy/crds").glob("cert-manager.io_*.yaml"):
        shutil.copyfile(path, folder / path.name)


_PROGRAMS = BuiltFolder("cert-manager", MODULE, _make)
built, build = _PROGRAMS.built, _PROGRAMS.build


def install(folder: Path, kubectl: Kubectl) -> None:
    """Add its kinds to the API server; `folder` is the result of `built`."""
    for path in sorted(folder.glob("cert-manager.io_*.yaml")):
        kubectl.run("apply", "--server-side", "-f", str(path))
    kinds = ("certificates", "issuers", "certificaterequests", "clusterissuers")
    kubectl.wait_until_known(*(f"{kind}.cert-manager.io" for kind in kinds))


class CertManager:
    """Its controllers, for a whole cluster that knows its kinds; the context ends them."""

    def __init__(self, folder: Path, kubectl: Kubectl, log: Path) -> None:
        """`folder` is the result of `built`."""
        self._folder, self._kubectl, self._log = folder, kubectl, log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [str(self._folder / "controllers"), "--kubeconfig", str(self._kubectl.kubeconfig)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def check(self) -> None:
        """Raises: UnavailableError with the end of its log if the process has ended."""
        if self._process is None or self._process.poll() is not None:
            raise UnavailableError(f"cert-manager ended: {self._log.read_text()[-2000:]}")
