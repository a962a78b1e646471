"""Kueue beside a real API server: its own definitions, and its own manager as a process.

The program is built from the Go module in `kueue_manager/` once, into the testbed's cache
(testbed.binaries), and its definitions are put beside it. Its webhooks are not registered: no
request of another program waits for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

import yaml

from dlion_api.errors import UnavailableError
from operator_process import free_ports
from testbed.binaries import build_once, cache_folder, go, hash_of, source_of
from testbed.certificates import Authority

if TYPE_CHECKING:
    from types import TracebackType

    from testbed.kubectl import Kubectl

MODULE = Path(__file__).with_name("kueue_manager")
NAME = "sigs.k8s.io/kueue"
NAMESPACE = "kueue-system"
_WITH_CERTIFICATES = """
mount -t tmpfs none /etc
mkdir -p /etc/kueue/metrics
ln -s "$0" /etc/kueue/metrics/certs
exec "$@"
"""
"""Its metrics read their certificate at a fixed path (root). Its webhooks' is below TMPDIR."""
_KINDS = ("workloads", "clusterqueues", "localqueues", "resourceflavors", "workloadpriorityclasses")


def _folder() -> Path:
    return cache_folder() / f"kueue-{hash_of(MODULE)}"


def definitions() -> Path:
    """A folder with its definitions alone (seconds). Raises: UnavailableError with what Go said."""
    folder = cache_folder() / f"kueue-kinds-{hash_of(MODULE)}"
    build_once(folder, _copy_definitions)
    return folder


def build() -> Path:
    """The folder with its manager, filled now if need be (five minutes on two cores; then nothing).

    Raises: UnavailableError with the end of what Go said.
    """
    build_once(_folder(), _make)
    return _folder()


def _make(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as made:
        package = f"{NAME}/cmd/kueue"
        go("build", "-trimpath", "-ldflags", "-s -w", "-o", made, package, module=MODULE)
        (Path(made) / "kueue").rename(folder / "kueue")


def _copy_definitions(folder: Path) -> None:
    go("mod", "download", NAME, module=MODULE)
    for path in (source_of(NAME, MODULE) / "config/components/crd/bases").glob("*.yaml"):
        shutil.copyfile(path, folder / path.name)


def install(kubectl: Kubectl) -> None:
    """Has the API server serve its kinds."""
    files = [f"--filename={path}" for path in sorted(definitions().glob("*.yaml"))]
    kubectl.run("apply", "--server-side", *files)
    kubectl.wait_until_known(*(f"{kind}.kueue.x-k8s.io" for kind in _KINDS))


class Kueue:
    """Its manager, on all of a cluster that knows its kinds; a context that ends it."""

    def __init__(self, folder: Path, kubectl: Kubectl, work: Path) -> None:
        """`folder` is what `build` yields; its configuration and log are kept in `work`."""
        self._folder, self._kubectl, self._work = folder, kubectl, work
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        served = self._work / "k8s-webhook-server" / "serving-certs"
        Authority.make(served, "ca").issue("tls", "kueue", hosts=("127.0.0.1",))
        health, metrics, webhook = free_ports(3)
        configuration = {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
            "metrics": {"bindAddress": f"127.0.0.1:{metrics}"},
            "webhook": {"port": webhook, "host": "127.0.0.1"},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "integrations": {
                "frameworks": ["batch/job"],
                "externalFrameworks": ["DLionJob.v1alpha1.dlion.dev"],
            },
        }
        path = self._work / "kueue.yaml"
        path.write_text(yaml.safe_dump(configuration))
        with (self._work / "kueue.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--propagation=private", "sh", "-ec", _WITH_CERTIFICATES,
                 str(served), str(self._folder / "kueue"), f"--config={path}", "--zap-log-level=2",
                 f"--kubeconfig={self._kubectl.kubeconfig}"],
                env={**os.environ, "TMPDIR": str(self._work)},
                stdout=log, stderr=log,
            )  # fmt: skip
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
        """Raises: UnavailableError with the end of its log where it has ended."""
        if self._process is None or self._process.poll() is not None:
            said = (self._work / "kueue.log").read_text()[-3000:]
            raise UnavailableError(f"Kueue ended: {said}")
