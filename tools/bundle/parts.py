"""The parts of a bundle that are not images: chart, wheels and SBOMs of images."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from bundle.archives import repack_chart
from bundle.errors import BundleError
from bundle.image_builders import ROOT, run

SYFT = "github.com/anchore/syft/cmd/syft@v1.57.1"
_WHEEL_TAGS = ("manylinux2014", "manylinux_2_17", "manylinux_2_28", "manylinux_2_34")
_WHEEL_MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}


def package_chart(folder: Path, version: str, epoch_s: int) -> Path:
    """Package the chart, the same bytes each time. Raises: BundleError."""
    run(_helm(), "package", "--destination", folder, ROOT / "helm/dlion")
    chart = folder / f"dlion-{version}.tgz"
    if not chart.exists():
        found = ", ".join(path.name for path in folder.iterdir())
        raise BundleError(f"pyproject.toml has version {version}, the chart another: {found}")
    repack_chart(chart, epoch_s)
    return chart


def collect_wheels(folder: Path, platform: str, scratch: Path) -> None:
    """Build the project's wheel, and fetch those of the extra `cluster` for Python 3.11.

    They have the lock's versions, and their hashes are checked. Raises: BundleError.
    """
    settings = scratch / "build.cfg"
    settings.write_text(f"[build]\nbuild_base = {scratch / 'build'}\n")
    uv = Path(sys.executable).with_name("uv")
    build = ("build", "--quiet", "--wheel", "--no-build-isolation", "--out-dir", folder, ROOT)
    run(uv, *build, env={"DIST_EXTRA_CONFIG": str(settings)})  # build/ may have removed modules
    (folder / ".gitignore").unlink(missing_ok=True)  # uv's
    lock = scratch / "cluster.lock"
    lock.write_text(run(sys.executable, "tools/image_requirements.py", "--extra", "cluster"))
    tags = [f"--platform={tag}_{_WHEEL_MACHINES[platform]}" for tag in _WHEEL_TAGS]
    run(
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes",
        "--only-binary=:all:", "--python-version=3.11", "--implementation=cp", "--abi=cp311",
        "--abi=abi3", "--abi=none", *tags, "--requirement", lock, "--dest", folder,
    )  # fmt: skip


def write_sbom(archive: Path, reference: str, sbom: Path) -> None:
    """List what an image holds as CycloneDX 1.6: Debian packages, Python packages and licences.

    Raises: BundleError.
    """
    name, _, version = reference.rpartition(":")
    run(
        _syft(), "scan", f"oci-archive:{archive}", "--quiet", f"--source-name={name}",
        f"--source-version={version}", f"--output=cyclonedx-json@1.6={sbom}",
        env={"SYFT_FILE_METADATA_SELECTION": "none"},  # packages without their thousands of files
    )  # fmt: skip
    document = json.loads(sbom.read_text())
    if not document.get("components"):
        raise BundleError(f"{reference}: syft found no packages in {archive}")
    del document["serialNumber"], document["metadata"]["timestamp"]  # random, and the present time
    sbom.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


def _helm() -> str:
    if found := os.environ.get("HELM") or shutil.which("helm"):
        return found
    sys.path.insert(0, str(ROOT / "tests/support"))
    from testbed.binaries import built

    binaries = built()
    if binaries is None:
        raise BundleError("no helm on the PATH: install Helm 3, or set HELM=")
    return str(binaries.path("helm"))


def _syft() -> str:
    """Return $SYFT, the one on the PATH, or one that Go builds into the cache (minutes, once)."""
    if found := os.environ.get("SYFT") or shutil.which("syft"):
        return found
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "dlion-bundle" / SYFT.rpartition("@")[2]
    program = folder / "syft"
    if not program.exists():
        if shutil.which("go") is None:
            raise BundleError("no syft on the PATH, and no go to build it: install either, or "
                              "set SYFT=")  # fmt: skip
        print(f"building {SYFT} into {folder}", file=sys.stderr)
        built = folder.with_suffix(f".{os.getpid()}")
        env = {**os.environ, "GOBIN": str(built), "CGO_ENABLED": "0"}
        linker = f"-s -w -X main.version={SYFT.rpartition('@v')[2]}"
        try:
            subprocess.run(
                ["go", "install", "-trimpath", f"-ldflags={linker}", SYFT], env=env, check=True
            )
            folder.mkdir(parents=True, exist_ok=True)
            (built / "syft").rename(program)
        except subprocess.CalledProcessError as error:
            raise BundleError(f"go install {SYFT} failed ({error.returncode})") from None
        finally:
            shutil.rmtree(built, ignore_errors=True)
    return str(program)
