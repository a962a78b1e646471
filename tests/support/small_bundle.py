"""A bundle as `make bundle` writes it, with small images, chart, wheel and SBOMs."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

from bundle.archives import write_image
from bundle.assembly import TARGETS, BundlePlan, assemble

VERSION = "0.1.0"
EPOCH_S = 1_700_000_000
BASE = f"registry.example/debian:bookworm-slim@sha256:{'ab' * 32}"


def write_small_bundle(
    folder: Path, platform: str = "linux/amd64", version: str = VERSION, content: bytes = b"one"
) -> Path:
    """The bundle's archive in `folder`, made by the code of `make bundle`."""
    plan = BundlePlan(version, platform, "buildah", BASE, EPOCH_S)
    root = folder / "parts" / plan.name
    for name in ("images", "charts", "crds", "wheels", "sbom"):
        (root / name).mkdir(parents=True)
    images = {}
    for target in TARGETS:
        reference = f"localhost/dlion-{target}:{version}"
        layout = write_layout(folder / f"layout-{target}", plan.platform, content)
        images[target] = write_image(layout, reference, root / f"images/{target}.tar", EPOCH_S)
        (root / f"sbom/{target}.cdx.json").write_text("{}\n")
    (root / f"charts/dlion-{version}.tgz").write_bytes(b"chart")
    (root / "crds/dlionjob.yaml").write_text("{}\n")
    (root / f"wheels/dlion-{version}-py3-none-any.whl").write_bytes(b"wheel")
    return assemble(plan, images, root, folder)


def write_layout(folder: Path, platform: str, content: bytes = b"one", images: int = 1) -> Path:
    """An OCI layout of an image with one layer of one file."""
    (folder / "blobs/sha256").mkdir(parents=True)
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as files:
        entry = tarfile.TarInfo("file")
        entry.size = len(content)
        files.addfile(entry, io.BytesIO(content))
    blob = _blob(folder, gzip.compress(layer.getvalue(), mtime=0))
    diff = f"sha256:{hashlib.sha256(layer.getvalue()).hexdigest()}"
    config = {
        "architecture": platform.partition("/")[2],
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [diff]},
        "config": {"Labels": {"org.opencontainers.image.base.name": BASE}},
    }
    settings = _blob(folder, json.dumps(config).encode())
    image = "application/vnd.oci.image"
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{image}.manifest.v1+json",
        "config": settings | {"mediaType": f"{image}.config.v1+json"},
        "layers": [blob | {"mediaType": f"{image}.layer.v1.tar+gzip"}],
    }
    found = _blob(folder, json.dumps(manifest).encode()) | {"mediaType": manifest["mediaType"]}
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (folder / "index.json").write_text(json.dumps({"manifests": [found] * images}))
    return folder


def extracted(bundle: Path, folder: Path) -> Path:
    """The bundle's folder, unpacked by tar as a user does."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-xf", bundle, "-C", folder], check=True)
    return folder / bundle.stem


def facts_of(folder: Path) -> dict[str, str]:
    """The content of bundle.yaml."""
    lines = (folder / "bundle.yaml").read_text().splitlines()
    pairs = (line.partition(": ") for line in lines if not line.startswith("#"))
    return {key: value for key, _, value in pairs}


def _blob(folder: Path, data: bytes) -> dict[str, object]:
    digest = hashlib.sha256(data).hexdigest()
    (folder / "blobs/sha256" / digest).write_bytes(data)
    return {"digest": f"sha256:{digest}", "size": len(data)}
