"""Archives whose bytes depend only on their content: sorted names, one time, no owner."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundle.errors import BundleError

_CHUNK_BYTES = 1 << 20
_IMAGE_NAME = "io.containerd.image.name"
_BASE_NAME = "org.opencontainers.image.base.name"
_REF_NAME = "org.opencontainers.image.ref.name"


@dataclass(frozen=True)
class ImageFacts:
    """The facts of an image that the installer needs."""

    reference: str
    digest: str
    """Digest of its manifest, `sha256:...`."""
    architecture: str
    unpacked_bytes: int
    """Size of its uncompressed layers on a node."""
    base: str
    """The name of its base image in its label."""


def write_tar(archive: Path, entries: Iterable[tuple[str, Path]], epoch_s: int) -> None:
    """Write files under these names, with `epoch_s` as their time."""
    with tarfile.open(archive, "w", format=tarfile.GNU_FORMAT) as out:
        for name, path in sorted(entries):
            entry = _entry(name, path.stat().st_size, epoch_s, path.stat().st_mode)
            with path.open("rb") as data:
                out.addfile(entry, data)


def write_image(layout: Path, reference: str, archive: Path, epoch_s: int) -> ImageFacts:
    """Write the one image of an OCI layout folder as an OCI archive with this name.

    Raises: BundleError if the folder is not such a layout or has several images.
    """
    try:
        manifests = json.loads((layout / "index.json").read_text())["manifests"]
    except (OSError, ValueError, KeyError) as error:
        raise BundleError(f"{reference}: the builder gave no OCI image ({error!r}); docker "
                          "needs version 25 or newer") from None  # fmt: skip
    if len(manifests) != 1:
        raise BundleError(f"{reference}: {len(manifests)} images in one archive, expected one")
    (found,) = manifests
    manifest = _document(layout, found["digest"])
    if "config" not in manifest:
        raise BundleError(f"{reference}: {found['digest']} is not an image manifest but "
                          f"{manifest.get('mediaType')}: build without attestations")  # fmt: skip
    descriptor = {
        "mediaType": found["mediaType"],
        "digest": found["digest"],
        "size": found["size"],
        # containerd and podman read the first, other tools the second.
        "annotations": {_IMAGE_NAME: reference, _REF_NAME: reference},
    }
    index = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [descriptor],
    }
    (layout / "index.json").write_text(json.dumps(index, indent=1) + "\n")
    layers = [_blob(layout, layer["digest"]) for layer in manifest["layers"]]
    blobs = {found["digest"], manifest["config"]["digest"]}
    blobs |= {layer["digest"] for layer in manifest["layers"]}
    paths = [layout / "index.json", layout / "oci-layout", *(_blob(layout, b) for b in blobs)]
    write_tar(archive, [(str(path.relative_to(layout)), path) for path in paths], epoch_s)
    settings = _document(layout, manifest["config"]["digest"])
    return ImageFacts(
        reference,
        found["digest"],
        settings["architecture"],
        sum(_uncompressed_bytes(layer) for layer in layers),
        (settings.get("config", {}).get("Labels") or {}).get(_BASE_NAME, ""),
    )


def repack_chart(chart: Path, epoch_s: int) -> None:
    """Rewrite a chart's archive: helm adds the time of packing to it."""
    contents: dict[str, bytes] = {}
    with tarfile.open(chart, "r:gz") as packed:
        for member in packed:
            if data := packed.extractfile(member):
                contents[member.name] = data.read()
    with (
        chart.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as compressed,  # no name, no time
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.GNU_FORMAT) as out,
    ):
        for name, content in sorted(contents.items()):
            out.addfile(_entry(name, len(content), epoch_s, 0o644), io.BytesIO(content))


def sha256_of(path: Path) -> str:
    """Return the file's digest in hexadecimal digits."""
    with path.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _entry(name: str, size: int, epoch_s: int, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = size, epoch_s
    entry.mode = 0o755 if mode & 0o100 else 0o644
    return entry


def _document(layout: Path, digest: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_blob(layout, digest).read_text())
    return found


def _blob(layout: Path, digest: str) -> Path:
    return layout / "blobs" / digest.replace(":", "/")


def _uncompressed_bytes(layer: Path) -> int:
    with layer.open("rb") as raw:
        is_compressed = raw.read(2) == b"\x1f\x8b"
    if not is_compressed:
        return layer.stat().st_size
    total = 0
    with gzip.open(layer) as data:
        while chunk := data.read(_CHUNK_BYTES):
            total += len(chunk)
    return total
