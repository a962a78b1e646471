"""The project's own images, built from its present Dockerfile and kept as archives.

An archive's name is a hash of all its inputs. An unchanged tree builds nothing; a change of sources
rebuilds one small layer, and the other layers come from buildah's storage. Nodes get the archives
by `Testbed.up(images=...)` or `Testbed.load_image`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.base_image import make_base_image
from testbed.binaries import cache_folder
from testbed.buildah import buildah, storage_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[3]
_SHARED = ("Dockerfile", ".dockerignore", "pyproject.toml", "requirements.lock",
           "requirements-gpu.lock", "requirements-uv.lock", "tools/image_requirements.py",
           "api/dlion_api")  # fmt: skip
_KEPT_ARCHIVES = 3
_STORAGE_LIMIT_BYTES = 15_000_000_000


class Target(StrEnum):
    """A stage of the Dockerfile that is an image; in build order."""

    OPERATOR = "operator"
    SIDECAR = "sidecar"
    WORKER = "worker"


_WORKER_SOURCES = (
    "worker/dlion_core", "worker/dlion_environments", "worker/dlion_results", "worker/dlion_worker",
)  # fmt: skip
_SOURCES = {
    Target.OPERATOR: ("operator/dlion_operator",),
    Target.SIDECAR: _WORKER_SOURCES,
    Target.WORKER: _WORKER_SOURCES,
}


@dataclass(frozen=True)
class ProjectImage:
    """One image of the present tree."""

    target: Target
    key: str
    """The hash of all its inputs."""

    @classmethod
    def of(cls, target: Target) -> ProjectImage:
        """Read every file that goes into it."""
        digest = hashlib.sha256(target.encode())
        for path in _inputs(target):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
        return cls(target, digest.hexdigest()[:12])

    @property
    def reference(self) -> str:
        """Its name in pods; it is never pulled and has no other content."""
        return f"dlion.test/{self.target}:{self.key}"

    @property
    def archive(self) -> Path:
        """The path of the archive, once it is built."""
        return cache_folder() / "images" / f"{self.target}-{self.key}.tar"

    @property
    def unpacked_bytes(self) -> int:
        """Size of its layers, which the archive holds as they are."""
        return self.archive.stat().st_size


def build_images(targets: Iterable[Target] = tuple(Target)) -> list[ProjectImage]:
    """Images of the present tree; missing ones are built (minutes the first time).

    Raises: UnavailableError with the end of buildah's output.
    """
    images = [ProjectImage.of(target) for target in targets]
    if all(image.archive.exists() for image in images):
        return images
    with alone():
        _bound_storage()
        base = make_base_image()
        for image in images:
            if not image.archive.exists():
                _build(image, base)
                _drop_older(image)
    return images


def _build(image: ProjectImage, base: str) -> None:
    log.warning("building %s", image.reference)
    buildah(
        "bud", "--layers", "--pull-never", "--network=host", "--format=docker",
        f"--target={image.target}", f"--tag={image.reference}", f"--build-arg=BASE={base}",
        str(ROOT),
    )  # fmt: skip
    new = image.archive.with_suffix(f".{os.getpid()}")
    try:
        buildah("push", image.reference, f"docker-archive:{new}:{image.reference}")
        new.rename(image.archive)
    finally:
        new.unlink(missing_ok=True)


def _inputs(target: Target) -> list[Path]:
    found: list[Path] = []
    for name in (*_SHARED, *_SOURCES[target]):
        path = ROOT / name
        found += [path] if path.is_file() else path.rglob("*")
    return sorted(p for p in found if p.is_file() and "__pycache__" not in p.parts)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A lock: one process at a time on this machine builds images."""
    folder = cache_folder() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _bound_storage() -> None:
    """Delete all layers if there are too many: the next build is a cold one."""
    root = storage_folder()
    used = sum(p.lstat().st_size for p in root.rglob("*") if p.is_file() and not p.is_symlink())
    if used > _STORAGE_LIMIT_BYTES:
        log.warning("%s holds %d MB: deleting it", root, used // 1_000_000)
        shutil.rmtree(root)


def _drop_older(image: ProjectImage) -> None:
    folder = image.archive.parent
    archives = sorted(folder.glob(f"{image.target}-*.tar"), key=lambda path: path.stat().st_mtime)
    for path in archives[:-_KEPT_ARCHIVES]:
        path.unlink()
