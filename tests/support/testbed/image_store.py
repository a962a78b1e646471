"""The project's images as containerd stores them, unpacked once for the nodes of every testbed.

An import takes half a minute on a node. Instead, the folder of a new node's containerd gets hard
links, because containerd does not change stored images. Its databases are copied.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dlion_api.errors import UnavailableError
from testbed.binaries import cache_folder
from testbed.project_images import alone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from testbed.project_images import ProjectImage

log = logging.getLogger(__name__)

_DATABASES = (
    "io.containerd.metadata.v1.bolt/meta.db",
    "io.containerd.snapshotter.v1.overlayfs/metadata.db",
)
_KEPT = (
    "io.containerd.content.v1.content",
    "io.containerd.metadata.v1.bolt",
    "io.containerd.snapshotter.v1.overlayfs",
)
_CONFIGURATION = """\
version = 2
root = "{folder}/root"
state = "{folder}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt",
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.aufs"]

[grpc]
  address = "{folder}/socket"
"""
_START_TIMEOUT_S = 30.0
_IMPORT_TIMEOUT_S = 600.0
_POLL_S = 0.1


def image_store(images: Sequence[ProjectImage]) -> Path:
    """Return a folder with these built images; create it if missing.

    Raises: UnavailableError with containerd's output.
    """
    key = hashlib.sha256(" ".join(image.reference for image in images).encode()).hexdigest()[:12]
    folder = cache_folder() / "images" / f"store-{key}"
    with alone():
        if not folder.exists():
            for old in folder.parent.glob("store-*"):
                shutil.rmtree(old)
            new = folder.with_name(f"store-{key}.{os.getpid()}")
            try:
                _import(images, new)
                (new / "root").rename(folder)
            finally:
                shutil.rmtree(new, ignore_errors=True)
    return folder


def seed(store: Path, target: Path) -> None:
    """Give the images of that store to a containerd that has not started yet.

    Its root folder will be `target`.
    """
    target.mkdir(parents=True, exist_ok=True)
    for name in _KEPT:
        source = store / name
        # On different file systems everything is copied.
        if subprocess.run(["cp", "-al", source, target], capture_output=True).returncode != 0:
            shutil.rmtree(target / name, ignore_errors=True)
            subprocess.run(["cp", "-a", source, target], check=True)
    for name in _DATABASES:
        own = target / f"{name}.own"
        shutil.copyfile(store / name, own)
        own.rename(target / name)


def _import(images: Sequence[ProjectImage], folder: Path) -> None:
    """Import with a separate containerd, whose mounts end with it."""
    log.warning("unpacking the project's images for the nodes of testbeds")
    folder.mkdir()
    configuration = folder / "containerd.toml"
    configuration.write_text(_CONFIGURATION.format(folder=folder))
    command = ["unshare", "--mount", "--propagation", "private", "containerd"]
    with (folder / "log").open("wb") as output:
        daemon = subprocess.Popen(
            [*command, f"--config={configuration}"], stdout=output, stderr=output
        )
    try:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while _ctr(folder, "version").returncode != 0:
            if daemon.poll() is not None or time.monotonic() > deadline_s:
                raise UnavailableError(f"containerd: {(folder / 'log').read_text()[-1500:]}")
            time.sleep(_POLL_S)
        for image in images:
            done = _ctr(folder, "images", "import", str(image.archive))
            if done.returncode != 0:
                raise UnavailableError(f"{image.reference}: {done.stderr.strip()}")
    finally:
        daemon.terminate()
        daemon.wait()


def _ctr(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ctr", f"--address={folder}/socket", "--namespace=k8s.io", *arguments],
        capture_output=True, text=True, check=False, timeout=_IMPORT_TIMEOUT_S,
    )  # fmt: skip
