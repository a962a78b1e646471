"""Test images for 64-bit ARM, which the kernel runs by qemu.

Without emulation of that architecture `make bundle PLATFORM=linux/arm64` names what to install.
With it the Dockerfile builds the images of operator and sidecar on an arm64 base. Their packages
have that architecture, and their programs start. With the worker's packages, which uv installs from
the lock without emulation, the sidecar's image trains one batch by TensorFlow, evaluates and saves
the model, and compiles a kernel.

Left out: the worker's stages of the Dockerfile, as emulation takes too long to compile TensorFlow's
sources and the codecs' kernels; a node of that architecture; docker and podman as builders.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from local_run import job_document
from testbed.base_image import make_base_image
from testbed.binaries import cache_folder
from testbed.buildah import buildah
from testbed.project_images import alone

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
HANDLER = Path("/usr/lib/binfmt.d/qemu-aarch64.conf")
EMULATE = f"""set -e
mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
cd /proc/sys/fs/binfmt_misc
sed s/^:qemu-aarch64:/:testbed-$$:/ {HANDLER} > register
echo ready
read -r end || true
echo -1 > testbed-$$
"""
"""Register a handler with the kernel, and remove it when standard input ends.

Its name is this test's own: the machine or another run may register and remove theirs meanwhile.
"""
OMITTED = ("click", "libclang", "matplotlib", "tensorboard-data-server")
DOCUMENT = job_document(1)
TRIAL = f"""
import os, time
from pathlib import Path
import dlion_worker.trainer.worker  # all that a worker imports
from dlion_api.spec import load_job
from dlion_worker.training.trial import try_program
found = try_program(load_job({DOCUMENT!r}), data_root=Path("/tmp"), program_root=Path("/tmp"))
print(os.uname().machine, f"{{time.process_time():.0f}} s of CPU:", found.text)
"""
KERNEL = """
import os, time
import numpy as np
from numba import types
from dlion_core.compiling import compiled, read_only

@compiled(types.float64(read_only(types.float32)))
def total(values):
    found = 0.0
    for each in values:
        found += each
    return found

print(os.uname().machine, f"{time.process_time():.0f} s of CPU:", total(np.arange(9, dtype="f4")))
"""
AARCH64 = 183
"""The machine in ELF's header."""
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module")
def emulation(testbed_possible: None) -> Iterator[None]:
    """Let the kernel run programs of arm64."""
    assert testbed_possible is None
    if not HANDLER.exists():
        pytest.skip("no qemu-aarch64: install it (Debian: qemu-user-static)")
    unshare = ["unshare", "--mount", "--propagation=private", "sh", "-c", EMULATE]
    with subprocess.Popen(
        unshare, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        yield
        assert holder.stdin is not None
        holder.stdin.close()


@pytest.fixture(scope="module", params=["operator", "sidecar"])
def image(emulation: None, request: pytest.FixtureRequest) -> str:
    """Build the image from the present tree."""
    assert emulation is None
    return built(request.param)


def built(target: str) -> str:
    """Build that image; the layers stay in buildah's storage."""
    reference = f"localhost/dlion-{target}:arm64"
    with alone():
        base = make_base_image("arm64")
        buildah(
            "bud", "--layers", "--pull-never", "--network=host", "--format=docker",
            "--platform=linux/arm64", f"--target={target}", f"--tag={reference}",
            f"--build-arg=BASE={base}", str(ROOT), timeout_s=3000,
        )  # fmt: skip
    return reference


@pytest.fixture(scope="module")
def worker_packages(emulation: None) -> Iterator[Path]:
    """Install the packages of the worker's image for arm64, without compiled Python."""
    assert emulation is None
    lock = subprocess.run(
        [
            sys.executable, "tools/image_requirements.py", "--extra=worker",
            *(f"--omit={name}" for name in OMITTED),
        ],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="arm64-") as made:
        folder = Path(made) / "packages"
        done = subprocess.run(
            [
                Path(sys.executable).with_name("uv"), "pip", "install", "--quiet", "--no-deps",
                "--require-hashes", "--only-binary=:all:", "--python-version=3.11",
                "--python-platform=aarch64-manylinux_2_34", f"--target={folder}",
                "--requirement=-",
            ],
            input=lock, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        yield folder


@contextmanager
def container(image: str) -> Iterator[str]:
    """Create a container of that image in buildah's storage."""
    name = f"arm64-{uuid.uuid4().hex[:8]}"
    buildah("from", "--pull-never", f"--name={name}", image)
    try:
        yield name
    finally:
        buildah("rm", name)


def test_without_emulation_a_bundle_names_what_to_install(tmp_path: Path) -> None:
    if Path("/proc/sys/fs/binfmt_misc/qemu-aarch64").exists():
        pytest.skip("this machine emulates arm64 already")
    options = ["--builder=testbed", "--platform=linux/arm64", f"--out={tmp_path}"]
    done = subprocess.run(
        [str(ROOT / ".venv/bin/python"), "-m", "bundle", *options],
        env=os.environ | {"PYTHONPATH": str(ROOT / "tools")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "does not emulate arm64. Install the emulation (Debian: qemu-user-static" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_image_is_of_arm64_and_its_program_starts(image: str) -> None:
    about = json.loads(buildah("inspect", "--type=image", image))
    assert about["OCIv1"]["architecture"] == "arm64"
    command = about["OCIv1"]["config"]["Entrypoint"]
    with container(image) as name:
        packages = buildah("run", name, "--", "dpkg-query", "--show", "-f", "${Architecture} ")
        assert set(packages.split()) == {"all", "arm64"}
        machine = buildah(
            "run", name, "--", "python", "-c", "import grpc, os; print(os.uname()[4])"
        )
        assert machine == "aarch64\n"
        assert buildah("run", name, "--", *command, "--help").startswith("usage:")


def test_the_packages_of_the_worker_are_of_arm64(worker_packages: Path) -> None:
    machines = []
    for path in worker_packages.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                header = file.read(20)
            if header.startswith(b"\x7fELF"):
                machines.append(int.from_bytes(header[18:], "little"))
    assert set(machines) == {AARCH64}
    assert len(machines) > 300


@pytest.mark.parametrize(
    ("script", "settings", "answer"),
    [
        # The trial needs no codec, and emulation takes minutes to compile all kernels.
        (TRIAL, ["--env=NUMBA_DISABLE_JIT=1"], "27,722 parameters"),
        (KERNEL, ["--env=NUMBA_CPU_NAME=generic"], "36.0"),
    ],
    ids=["one batch", "a kernel"],
)
def test_a_worker_trains_and_compiles_kernels(
    worker_packages: Path, script: str, settings: list[str], answer: str
) -> None:
    with container(built("sidecar")) as name:
        printed = buildah(
            "run", f"--volume={worker_packages}:/packages:ro", "--env=PYTHONPATH=/packages",
            *settings, name, "--", "python", "-c", script,
        )  # fmt: skip
    print(printed)
    assert printed.startswith("aarch64 ")
    assert answer in printed
