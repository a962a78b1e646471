"""Builders of images: docker, podman or buildah, or the testbed's buildah.

Each writes an OCI layout folder. The testbed's builder has a stand-in for the base image, for
machines without a registry. Its images are for tests, since the stand-in has the machine's own
settings.
"""

from __future__ import annotations

import os
import platform as machine
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bundle.errors import BundleError

ROOT = Path(__file__).resolve().parents[2]
PLATFORMS = ("linux/amd64", "linux/arm64")
BUILDERS = ("docker", "podman", "buildah", "testbed")
_FORMAT = "--format=docker"
"""In OCI's own format buildah 1.28 names the digest of an earlier stage as that of the base."""
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_EMULATORS = {"amd64": "qemu-x86_64", "arm64": "qemu-aarch64"}
_BINFMT = Path("/proc/sys/fs/binfmt_misc")


@dataclass(frozen=True)
class BuildRequest:
    """One image to build."""

    target: str
    """The Dockerfile's stage."""
    reference: str
    base: str
    platform: str

    @property
    def options(self) -> list[str]:
        """Return the options of all builders."""
        # A Dockerfile cannot take the digest out of a name, and buildah 1.28 ignores `--label` for
        # an image whose layers it has already built.
        digest = self.base.partition("@")[2]
        return [
            f"--target={self.target}", f"--tag={self.reference}", f"--platform={self.platform}",
            f"--build-arg=BASE={self.base}", f"--build-arg=BASE_DIGEST={digest}",
        ]  # fmt: skip


def own_platform() -> str:
    """Return the platform of this machine. Raises: BundleError if it has no images."""
    architecture = _MACHINES.get(machine.machine())
    if architecture is None:
        raise BundleError(f"no images for {machine.machine()}: allowed are {', '.join(_MACHINES)}")
    return f"linux/{architecture}"


def require_platform(platform: str, builder: str) -> None:
    """Check that this machine can run or emulate that platform. Raises: BundleError."""
    if platform == own_platform():
        return
    architecture = platform.partition("/")[2]
    if builder == "docker":
        listed = run("docker", "buildx", "inspect", "--bootstrap")
        can_build = platform in listed
    else:
        handler = _BINFMT / _EMULATORS[architecture]
        can_build = handler.exists() and "enabled" in handler.read_text()
    if not can_build:
        raise BundleError(
            f"PLATFORM={platform}: this machine is {own_platform()} and does not emulate "
            f"{architecture}. Install the emulation (Debian: qemu-user-static, binfmt-support) or "
            f"run `make bundle` on a machine of that architecture."
        )


def chosen_builder(name: str) -> str:
    """Return the builder of that name, or the first that works here.

    Raises: BundleError with the existing ones.
    """
    if name != "auto":
        if name not in BUILDERS:
            raise BundleError(f"BUILDER={name}: allowed are {', '.join(BUILDERS)}")
        if name != "testbed" and shutil.which(name) is None:
            raise BundleError(f"BUILDER={name}: no such program on the PATH")
        return name
    if shutil.which("docker") and _works("docker", "info"):
        return "docker"
    for program in ("podman", "buildah"):
        if shutil.which(program):
            return program
    raise BundleError("no docker, podman or buildah on the PATH: install one of them")


def build_layout(builder: str, request: BuildRequest, layout: Path) -> None:
    """Build an image and write it as an OCI layout folder. Raises: BundleError."""
    {
        "docker": _by_docker,
        "podman": _by_podman,
        "buildah": _by_buildah,
        "testbed": _by_testbed,
    }[builder](request, layout)


def testbed_base(platform: str) -> str:
    """Return the name of the testbed's stand-in for the base image; create it if it is missing.

    Raises: BundleError.
    """
    _use_testbed()
    from dlion_api.errors import UnavailableError
    from testbed.base_image import make_base_image
    from testbed.project_images import alone

    try:
        with alone():
            return make_base_image(platform.partition("/")[2])
    except UnavailableError as error:
        raise BundleError(str(error)) from None


def run(*command: str | Path, env: Mapping[str, str] | None = None) -> str:
    """Return the output of a program. Raises: BundleError with the end of its output."""
    try:
        done = subprocess.run(
            [str(word) for word in command],
            cwd=ROOT, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise BundleError(f"no {command[0]} on the PATH: install it") from None
    if done.returncode != 0:
        output = (done.stdout + done.stderr).strip()[-3000:]
        raise BundleError(f"{command[0]} {command[1]} failed ({done.returncode}):\n{output}")
    return done.stdout


def _by_docker(request: BuildRequest, layout: Path) -> None:
    run("docker", "build", "--provenance=false", *request.options, ".")
    _unpacked(lambda path: run("docker", "save", "--output", path, request.reference), layout)


def _by_podman(request: BuildRequest, layout: Path) -> None:
    run("podman", "build", _FORMAT, *request.options, ".")
    save = ("podman", "save", "--format=oci-archive", "--output")
    _unpacked(lambda path: run(*save, path, request.reference), layout)


def _by_buildah(request: BuildRequest, layout: Path) -> None:
    run("buildah", "bud", "--layers", _FORMAT, *request.options, ".")
    run("buildah", "push", request.reference, f"oci:{layout}")


def _by_testbed(request: BuildRequest, layout: Path) -> None:
    _use_testbed()
    from dlion_api.errors import UnavailableError
    from testbed.buildah import buildah
    from testbed.project_images import alone

    options: Sequence[str] = ("--layers", "--pull-never", "--network=host", _FORMAT)
    try:
        with alone():
            buildah("bud", *options, *request.options, str(ROOT))
            buildah("push", request.reference, f"oci:{layout}")
    except UnavailableError as error:
        raise BundleError(str(error)) from None


def _use_testbed() -> None:
    for folder in ("tests/support", "api"):
        if (path := str(ROOT / folder)) not in sys.path:
            sys.path.insert(0, path)


def _unpacked(save: Callable[[Path], str], layout: Path) -> None:
    archive = layout.with_suffix(".save")
    try:
        save(archive)
        with tarfile.open(archive) as packed:
            packed.extractall(layout, filter="data")
    finally:
        archive.unlink(missing_ok=True)


def _works(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
