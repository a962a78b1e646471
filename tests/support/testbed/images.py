"""Images for a testbed without a registry: archives of static programs, written in Python.

The format is that of `docker save`, which containerd and `docker load` both read. buildah builds
the project's own, larger images from a Dockerfile (README.md).
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import subprocess
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dlion_api.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from testbed.binaries import Binaries

PAUSE_IMAGE = "dlion.test/pause:1"
COREDNS_IMAGE = "dlion.test/coredns:1.12.4"
BUSYBOX_IMAGE = "dlion.test/busybox:1"
BUSYBOX = Path("/bin/busybox")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Image:
    """An image of one layer."""

    reference: str
    files: Mapping[str, Path]
    """Path inside the image to the program to copy there."""
    command: Sequence[str]
    links: Mapping[str, str] = field(default_factory=dict)
    """Path inside the image to the target of the link."""
    folders: Sequence[str] = ("tmp",)

    def write(self, archive: Path) -> Path:
        """Write the archive, with the same bytes for the same content; return its path."""
        layer = self._layer()
        config = json.dumps({
            "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Entrypoint": list(self.command), "Env": ["PATH=/bin"], "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{_digest(layer)}"]},
            "history": [{"created_by": "testbed"}],
        }).encode()  # fmt: skip
        names = (f"{_digest(config)}.json", f"{_digest(layer)}/layer.tar")
        manifest = [{"Config": names[0], "RepoTags": [self.reference], "Layers": [names[1]]}]
        with tarfile.open(archive, "w") as out:
            for name, data in (
                (names[0], config),
                (names[1], layer),
                ("manifest.json", json.dumps(manifest).encode()),
            ):
                _add(out, name, data, 0o644)
        return archive

    def _layer(self) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as layer:
            parents = {str(p) for name in (*self.files, *self.links) for p in Path(name).parents}
            for name in sorted({*self.folders, *parents} - {".", "/"}):
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
                layer.addfile(entry)
            for name, path in sorted(self.files.items()):
                _add(layer, name, path.read_bytes(), 0o755)
            for name, target in sorted(self.links.items()):
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, target, 0o777
                layer.addfile(entry)
        return buffer.getvalue()


def own_images(binaries: Binaries) -> list[Image]:
    """The images of every node: the pod sandbox, CoreDNS, and a shell for the tests.

    Raises: UnavailableError without a static busybox.
    """
    if not BUSYBOX.exists():
        raise UnavailableError(f"no {BUSYBOX}: `make testbed-setup` (Debian: busybox-static)")
    listed = subprocess.run([str(BUSYBOX), "--list"], capture_output=True, text=True, check=True)
    applets = {f"bin/{name}": "/bin/busybox" for name in listed.stdout.split() if name != "busybox"}
    return [
        Image(PAUSE_IMAGE, {"pause": binaries.path("pause")}, ["/pause"]),
        Image(COREDNS_IMAGE, {"bin/coredns": binaries.path("coredns")}, ["/bin/coredns"]),
        Image(BUSYBOX_IMAGE, {"bin/busybox": BUSYBOX}, ["/bin/sh"], applets),
    ]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _add(archive: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    archive.addfile(entry, io.BytesIO(data))
