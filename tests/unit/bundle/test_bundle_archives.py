"""Test the archives of a bundle.

- A bundle of the same parts has the same bytes, whatever the clock and the order of files. Its
  images keep their blobs and get the names that containerd reads.
- Anything but a single image is refused. A platform that this machine cannot build, a missing
  builder and a wrong base are refused before any build.

Left out: the builders of images (tests/cluster/test_bundle.py), the wheels (tests/local).
"""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bundle.archives import repack_chart, sha256_of, write_image
from bundle.errors import BundleError
from bundle.image_builders import BUILDERS, own_platform
from small_bundle import BASE, EPOCH_S, extracted, facts_of, write_layout, write_small_bundle

ROOT = Path(__file__).parents[3]
REFERENCE = "localhost/dlion-operator:0.1.0"


def test_the_same_parts_give_the_same_bytes(tmp_path: Path) -> None:
    first = write_small_bundle(tmp_path / "first")
    second = write_small_bundle(tmp_path / "second")
    assert first.read_bytes() == second.read_bytes()
    other = write_small_bundle(tmp_path / "other", content=b"two")
    assert other.read_bytes() != first.read_bytes()
    with tarfile.open(first) as files:
        members = files.getmembers()
    assert [m.name for m in members] == sorted(m.name for m in members)
    assert {(m.mtime, m.uid, m.gid, m.uname) for m in members} == {(EPOCH_S, 0, 0, "")}
    assert {m.mode for m in members} == {0o644, 0o755}
    published = first.with_name(f"{first.name}.sha256").read_text()
    assert published == f"{sha256_of(first)}  {first.name}\n"


def test_a_bundle_has_a_checksum_of_every_file_and_names_its_base(tmp_path: Path) -> None:
    folder = extracted(write_small_bundle(tmp_path), tmp_path / "out")
    listed = {line[66:] for line in (folder / "checksums.txt").read_text().splitlines()}
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert listed == found - {"checksums.txt"}
    done = subprocess.run(["sha256sum", "--strict", "-c", "checksums.txt"], cwd=folder)
    assert done.returncode == 0
    facts = facts_of(folder)
    assert facts["base"] == BASE
    assert facts["operator.reference"] == REFERENCE
    assert BASE in (folder / "README.md").read_text()
    assert "@" not in (folder / "README.md").read_text().replace(BASE, "")
    assert os.access(folder / "install.sh", os.X_OK)


def test_an_image_keeps_its_blobs_and_gets_its_name(tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", "linux/arm64", b"x" * 100_000)
    (layout / "blobs/sha256" / ("0" * 64)).write_bytes(b"of another image")
    before = json.loads((layout / "index.json").read_text())["manifests"][0]
    facts = write_image(layout, REFERENCE, tmp_path / "image.tar", EPOCH_S)
    assert facts.base == BASE
    assert facts.digest == before["digest"]
    assert facts.architecture == "arm64"
    assert 100_000 < facts.unpacked_bytes < 120_000
    with tarfile.open(tmp_path / "image.tar") as files:
        names = files.getnames()
        index = json.loads(files.extractfile("index.json").read())
    assert len(names) == 5  # index, version, manifest, configuration, layer
    assert not any("0" * 64 in name for name in names)
    (found,) = index["manifests"]
    assert found["digest"] == before["digest"]
    assert set(found["annotations"].values()) == {REFERENCE}


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        (None, "gave no OCI image"),
        ("", "gave no OCI image"),
        ("{}", "gave no OCI image"),
        ('{"manifests": []}', "0 images in one archive"),
    ],
)
def test_an_invalid_image_is_refused(tmp_path: Path, index: str | None, problem: str) -> None:
    if index is not None:
        (tmp_path / "index.json").write_text(index)
    with pytest.raises(BundleError, match=problem):
        write_image(tmp_path, REFERENCE, tmp_path / "image.tar", EPOCH_S)


def test_several_images_in_one_archive_are_refused(tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", "linux/amd64", images=2)
    with pytest.raises(BundleError, match="2 images in one archive"):
        write_image(layout, REFERENCE, tmp_path / "image.tar", EPOCH_S)


def test_a_chart_packaged_at_another_time_has_the_same_bytes(tmp_path: Path) -> None:
    made = []
    for time_s, order in ((1, ("b", "a")), (2, ("a", "b"))):
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as files:
            for name in order:
                entry = tarfile.TarInfo(f"dlion/{name}")
                entry.size, entry.mtime = len(name), time_s
                files.addfile(entry, io.BytesIO(name.encode()))
        chart = tmp_path / f"{time_s}.tgz"
        chart.write_bytes(gzip.compress(data.getvalue(), mtime=time_s))
        repack_chart(chart, EPOCH_S)
        made.append(chart.read_bytes())
    assert made[0] == made[1]
    with tarfile.open(tmp_path / "1.tgz") as files:
        assert {m.name: files.extractfile(m).read() for m in files} == {
            "dlion/a": b"a", "dlion/b": b"b"
        }  # fmt: skip


FOREIGN = {"linux/amd64": "linux/arm64", "linux/arm64": "linux/amd64"}[own_platform()]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--platform=linux/riscv64"], "PLATFORM=linux/riscv64: allowed are linux/amd64"),
        (["--platform=amd64"], "PLATFORM=amd64: allowed are"),
        (["--builder=kaniko"], f"BUILDER=kaniko: allowed are {', '.join(BUILDERS)}"),
        (["--builder=podman"], "BUILDER=podman: no such program on the PATH"),
        (["--builder=testbed", "--base=debian"], "leave BASE out"),
        (["--builder=testbed", "--base=--privileged"], "'--privileged' is not an image"),
        (["--builder=testbed", "--base=debian@sha256:..."], "NAME or NAME@sha256:DIGITS"),
        (["--builder=testbed", f"--platform={FOREIGN}"], f"does not emulate {FOREIGN[6:]}"),
    ],
)
def test_an_impossible_build_is_refused_first(
    tmp_path: Path, options: list[str], problem: str
) -> None:
    if "emulate" in problem and any(Path("/proc/sys/fs/binfmt_misc").glob("qemu-*")):
        pytest.skip("this machine emulates other architectures")
    environment = {"PYTHONPATH": str(ROOT / "tools"), "PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "bundle", f"--out={tmp_path}/out", *options],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert problem in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("base", [[], [f"--base={BASE}"]])
@pytest.mark.parametrize("given", ["yesterday", "-1", "0", "99999999999"])
def test_a_wrong_time_is_refused_and_a_base_without_digest_reported(
    tmp_path: Path, given: str, base: list[str]
) -> None:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "tools"), "SOURCE_DATE_EPOCH": given, "PATH": str(tmp_path)
    }  # fmt: skip
    (tmp_path / "buildah").symlink_to("/bin/true")
    done = subprocess.run(
        [sys.executable, "-m", "bundle", f"--out={tmp_path}/out", "--builder=buildah", *base],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"SOURCE_DATE_EPOCH={given}" in done.stderr
    how = "crane digest docker.io/library/debian:bookworm-slim"
    assert (how in done.stderr) == (not base)
    assert not (tmp_path / "out").exists()
