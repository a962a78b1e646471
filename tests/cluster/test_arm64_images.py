"""Test images for 64-bit ARM, which the kernel runs by qemu.

Without emulation of that architecture `make bundle PLATFORM=linux/arm64` names what to install.
With it the Dockerfile builds all images on an arm64 base. Their packages and libraries have that
architecture, and their programs start. The worker's image trains one batch by TensorFlow, with the
kernels that its build compiled.

Left out: a node of that architecture; docker and podman as builders.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from local_run import job_document
from testbed.base_image import make_base_image
from testbed.buildah import buildah
from testbed.project_images import Target, alone

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
DOCUMENT = job_document(1)
TRIAL = f"""
import os, time
from pathlib import Path
import dlion_worker.trainer.worker  # all that a worker imports
from dlion_api.spec import load_job
from dlion_worker.training.trial import try_program
found = try_program(load_job({DOCUMENT!r}), data_root=Path("/tmp"), program_root=Path("/tmp"))
print(os.uname().machine, f"{{time.process_time():.0f}} s of CPU:", found.text)
import numpy as np
from dlion_core.codecs.norms import squared_norm_of
print("norm", squared_norm_of(np.arange(9, dtype="f4")))
print("compiled here:", sum(squared_norm_of.stats.cache_misses.values()))
"""
MACHINES = """
import os
machines = {}
for folder, _, names in os.walk("/opt"):
    for path in (os.path.join(folder, name) for name in names):
        if os.path.isfile(path) and not os.path.islink(path):
            with open(path, "rb") as file:
                header = file.read(20)
            if header.startswith(b"\\x7fELF"):
                machine = int.from_bytes(header[18:], "little")
                machines[machine] = machines.get(machine, 0) + 1
print(machines)
"""
AARCH64 = 183
"""The machine in ELF's header."""
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(7200),
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


@pytest.fixture(scope="module", params=list(Target))
def image(emulation: None, request: pytest.FixtureRequest) -> str:
    """Build the image from the present tree; the layers stay in buildah's storage."""
    assert emulation is None
    reference = f"localhost/dlion-{request.param}:arm64"
    with alone():
        base = make_base_image("arm64")
        buildah(
            "bud", "--layers", "--pull-never", "--network=host", "--format=docker",
            "--platform=linux/arm64", f"--target={request.param}", f"--tag={reference}",
            f"--build-arg=BASE={base}", str(ROOT), timeout_s=5400,
        )  # fmt: skip
    return reference


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
        found = ast.literal_eval(buildah("run", name, "--", "python", "-c", MACHINES))
        assert list(found) == [AARCH64]
        assert found[AARCH64] > 5
        if "worker" in image:
            printed = buildah("run", name, "--", "python", "-c", TRIAL)
            print(printed)
            assert printed.startswith("aarch64 ")
            assert "27,722 parameters" in printed
            assert printed.endswith("norm 204.0\ncompiled here: 0\n")
