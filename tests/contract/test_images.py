"""Tests of the packages in images: they are those of the lock, with its hashes, and only the
required ones.

For each image, its part of the lock is the closure of its extra, by the packages' metadata. Hashes
are those of the lock. The lock for GPUs agrees with it. The Dockerfile's argument selects a lock as
the tests here do. An invalid lock or option is refused with a message.

Left out: the images (tests/cluster/test_images.py).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements.lock"
GPU_LOCK = ROOT / "requirements-gpu.lock"
GPU = ["--omit", "tensorflow-cpu", f"--lock={LOCK}", f"--lock={GPU_LOCK}"]
SMALLEST_LOCK = f"kopf==1 \\\n    --hash=sha256:{'a' * 64}\n    # via dlion (pyproject.toml)\n"


def run(*options: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    tool = str(ROOT / "tools/image_requirements.py")
    return subprocess.run(
        [sys.executable, tool, *options], cwd=folder, capture_output=True, text=True, check=False
    )


def printed(*options: str) -> str:
    done = run(*options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks(text: str) -> dict[str, str]:
    """Map the first line of each requirement (name, version, marker) to its hashes."""
    parts = re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)
    lines = [
        [line for line in part.splitlines() if not line.strip().startswith("#")]
        for part in parts
        if part.strip()
    ]
    return {first: "\n".join(rest).strip() for first, *rest in lines}


def here(text: str) -> set[str]:
    """Names for the platform of this test."""
    found = [Requirement(first.rstrip(" \\")) for first in blocks(text)]
    return {normal(r.name) for r in found if r.marker is None or r.marker.evaluate({"extra": ""})}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(extra: str, omitted: set[str]) -> set[str]:
    """The packages of the extra and their dependencies, by the metadata of installed packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"][extra]]
    waiting, visited = [Requirement(line) for line in asked], set()
    names: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = normal(requirement.name)
        if name in omitted or str(requirement) in visited:
            continue
        visited.add(str(requirement))
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        names.add(name)
        for line in distribution(name).requires or []:
            needed = Requirement(line)
            if needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)
            ):
                needed.marker = None
                waiting.append(needed)
    return names


@pytest.mark.parametrize(
    ("extra", "omitted"),
    [
        ("operator", {"click", "packaging", "rich"}),
        ("sidecar", {"click", "packaging", "rich"}),
        ("worker", {"click", "libclang", "matplotlib", "tensorboard-data-server"}),
        ("operator", set()),
    ],
)
def test_an_image_gets_exactly_the_packages_of_its_extra(extra: str, omitted: set[str]) -> None:
    options = [f"--extra={extra}", *(f"--omit={name}" for name in sorted(omitted))]
    assert here(printed(*options)) == closure(extra, omitted)


@pytest.mark.parametrize("extra", ["operator", "sidecar", "worker"])
def test_every_line_is_one_of_the_lock_with_its_hashes(extra: str) -> None:
    locked = blocks(LOCK.read_text())
    made = blocks(printed(f"--extra={extra}"))
    assert made
    assert all(locked[first] == hashes and "sha256:" in hashes for first, hashes in made.items())


def test_operator_and_sidecar_have_neither_tensorflow_nor_numpy() -> None:
    heavy = {"tensorflow", "tensorflow-cpu", "keras", "numpy", "scipy", "numba", "llvmlite"}
    for extra in ("operator", "sidecar"):
        assert not heavy & here(printed(f"--extra={extra}"))


@pytest.mark.parametrize(
    "module", ["dlion_operator.controller.site_operator", "dlion_worker.sidecar.__main__"]
)
def test_operator_and_sidecar_import_neither(module: str) -> None:
    code = f"import {module}, sys; print(*{{'keras', 'numpy', 'tensorflow'}} & sys.modules.keys())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


def test_the_dockerfile_uses_existing_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    taken = set(re.findall(r"--extra (\S+)", (ROOT / "Dockerfile").read_text()))
    assert taken == {"operator", "sidecar", "worker"}
    extras = project["optional-dependencies"]
    assert set(extras["sidecar"]) <= set(extras["worker"])


def test_all_stages_start_from_one_argument_which_each_image_has_as_label() -> None:
    text = (ROOT / "Dockerfile").read_text()
    stages = dict(
        re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    )
    starts = set(re.findall(r"^FROM (\S+) AS", text, re.MULTILINE)) - stages.keys()
    assert starts == {"${BASE}"}
    assert (
        "ARG BASE=docker.io/library/debian:bookworm-slim\n" in text.partition("\nFROM ")[0] + "\n"
    )
    for target in ("operator", "sidecar", "worker"):
        assert stages[target].startswith("ARG BASE\n")
        assert 'org.opencontainers.image.base.name="${BASE}"' in stages[target]


def test_the_stage_that_compiles_kernels_has_all_their_imports(tmp_path: Path) -> None:
    stage = (ROOT / "Dockerfile").read_text().partition(" AS kernels\n")[2].partition("\nFROM ")[0]
    copies = re.findall(
        r"^COPY (.*) /opt/dlion/lib/python3.11/site-packages/(\S+)/$", stage, re.MULTILINE
    )
    assert len(copies) == 3
    for sources, target in copies:
        for source in map(ROOT.joinpath, sources.split()):
            if source.is_dir():
                shutil.copytree(source, tmp_path / target)
            else:
                (tmp_path / target).mkdir(exist_ok=True)
                shutil.copy(source, tmp_path / target)
    # This omits site's files, by which an editable install would find missing modules.
    packages = sysconfig.get_path("purelib")
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import dlion_core.codecs as it; print(it.__file__)"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": f"{tmp_path}:{packages}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


def test_the_lock_for_gpus_agrees_with_the_lock() -> None:
    def versions(path: Path) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for first in blocks(path.read_text()):
            name, version = first.split(" ")[0].split("==")
            found.setdefault(name, set()).add(version)
        return found

    ours, gpu = versions(LOCK), versions(GPU_LOCK)
    assert all(gpu[name] <= ours[name] for name in gpu.keys() & ours.keys())
    strange = {name for name in gpu.keys() - ours.keys() if not name.startswith("nvidia-")}
    assert not strange


def test_a_worker_for_gpus_has_cuda_and_one_tensorflow() -> None:
    made = here(printed("--extra=worker", *GPU))
    assert {"tensorflow", "nvidia-cudnn-cu12", "nvidia-cublas-cu12", "scikit-learn"} <= made
    assert "tensorflow-cpu" not in made
    text = printed("--extra=worker", *GPU)
    assert text.count("\ntensorflow==") == text.count("\nkeras==") == 1


@pytest.mark.parametrize(("tensorflow", "options"), [("cpu", []), ("gpu", GPU)])
def test_the_build_argument_selects_the_lock(tensorflow: str, options: list[str]) -> None:
    """A shell runs the Dockerfile's own lines."""
    done = selected_by_the_dockerfile(tensorflow)
    assert done.returncode == 0, done.stderr
    asked = done.stdout.splitlines()
    assert asked[:2] == ["--extra", "worker"]
    ours = " ".join(options).replace("=", " ").replace(f"{ROOT}/", "")
    assert " ".join(asked).endswith(ours)
    assert ("requirements-gpu.lock" in asked) == bool(options)
    assert here(printed(*asked)) >= {"tensorflow" if options else "tensorflow-cpu", "keras"}


def test_another_build_argument_is_refused() -> None:
    done = selected_by_the_dockerfile("rocm")
    assert done.returncode == 1
    assert done.stderr == "TENSORFLOW=rocm: allowed are cpu and gpu\n"


def selected_by_the_dockerfile(tensorflow: str) -> subprocess.CompletedProcess[str]:
    """The arguments of the Dockerfile for tools/image_requirements.py, one on each line."""
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", "")
    (script,) = re.findall(r"(set -- --extra worker .*? esac) +&&", lines)
    return subprocess.run(
        ["sh", "-c", f"{script} && printf '%s\\n' \"$@\""],
        env={"TENSORFLOW": tensorflow}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "lock", "message"),
    [
        (["--extra=gpu"], None, "no extra gpu in pyproject.toml; it has: cluster, dev"),
        (["--extra=operator", "--omit=nothing-such"], None, "not in the lock: nothing-such"),
        (["--extra=operator", "--omit=../x"], None, "is not a requirement"),
        (["--extra=operator"], "kopf==1\n    # via dlion\n", "no hash for kopf"),
        (["--extra=operator"], SMALLEST_LOCK, "not in the lock: aiohttp, click, cryptography"),
        (["--extra=operator"], "", "not in the lock: aiohttp, click"),
        (["--extra=operator"], "\0\xff\n", "is not a requirement"),
        (["--extra=operator", "--lock=/nowhere"], None, "No such file"),
    ],
)
def test_an_invalid_lock_or_option_is_refused(
    tmp_path: Path, options: list[str], lock: str | None, message: str
) -> None:
    if lock is not None:
        (tmp_path / "lock").write_text(lock)
        options = [*options, f"--lock={tmp_path}/lock"]
    done = run(*options)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
