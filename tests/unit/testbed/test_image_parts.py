"""Test the parts of container images, without root.

The name of an image depends on all its content and on nothing else. Files of this machine in the
stand-in for the base image have the form that their readers need.

Left out: building and running them (tests/cluster/test_images.py).
"""

from __future__ import annotations

import shutil
import tomllib
from itertools import chain
from typing import TYPE_CHECKING

import pytest

from testbed import base_image, project_images
from testbed.project_images import ROOT, ProjectImage, Target

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy everything that the images contain."""
    for name in {*project_images._SHARED, *chain(*project_images._SOURCES.values())}:
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
    monkeypatch.setattr(project_images, "ROOT", tmp_path)
    return tmp_path


def keys() -> dict[Target, str]:
    return {target: ProjectImage.of(target).key for target in Target}


@pytest.mark.parametrize(
    ("changed", "images"),
    [
        ("Dockerfile", set(Target)),
        (".dockerignore", set(Target)),
        ("requirements.lock", set(Target)),
        ("requirements-gpu.lock", set(Target)),
        ("pyproject.toml", set(Target)),
        ("api/dlion_api/names.py", set(Target)),
        ("operator/dlion_operator/model/settings.py", {Target.OPERATOR}),
        ("worker/dlion_worker/new.py", {Target.SIDECAR, Target.WORKER}),
        ("worker/dlion_core/new.py", {Target.SIDECAR, Target.WORKER}),
        ("worker/dlion_environments/new.py", {Target.SIDECAR, Target.WORKER}),
        ("api/dlion_api/__pycache__/names.cpython-311.pyc", set()),
    ],
)
def test_an_image_has_another_name_when_its_content_changes(
    tree: Path, changed: str, images: set[Target]
) -> None:
    before = keys()
    (tree / changed).parent.mkdir(exist_ok=True)
    with (tree / changed).open("a") as file:
        file.write("# changed\n")
    after = keys()
    assert {target for target in Target if before[target] != after[target]} == images
    assert keys() == after


def test_no_two_images_share_a_name() -> None:
    assert len({ProjectImage.of(target).reference for target in Target}) == len(Target)


def test_all_copied_files_affect_the_name_and_pass_the_ignore_file() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {
        word.rstrip("/")
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    }
    named = (*project_images._SHARED, *chain(*project_images._SOURCES.values()))
    allowed = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    ]
    assert copied
    for path in copied:
        assert any(path == name or path.startswith(f"{name}/") for name in named), path
        assert any(path == name or path.startswith(f"{name}/") for name in allowed), path
        assert (ROOT / path).exists()


def test_a_bundle_is_split_into_its_certificates() -> None:
    one = "-----BEGIN CERTIFICATE-----\nMTIz\n-----END CERTIFICATE-----\n"
    assert base_image._single(f"# a name\n{one}\n# another\n{one}trailing".encode()) == [one, one]
    assert base_image._single(b"") == []


def test_uv_gets_the_settings_of_pip() -> None:
    pip = {"index-url": "https://one.example/simple", "extra-index-url": "https://two.example a"}
    assert tomllib.loads(base_image._uv_settings(pip)) == {
        "system-certs": True,
        "index-url": "https://one.example/simple",
        "extra-index-url": ["https://two.example", "a"],
    }
    assert tomllib.loads(base_image._uv_settings({})) == {"system-certs": True}
