"""Assemble a bundle: `build_bundle` builds the parts, `assemble` adds the texts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bundle.archives import ImageFacts, sha256_of, write_image, write_tar
from bundle.errors import BundleError
from bundle.image_builders import ROOT, BuildRequest, build_layout
from bundle.parts import collect_wheels, package_chart, write_sbom

TARGETS = ("operator", "sidecar", "worker")
REGISTRY = "localhost"
"""Images of a bundle are never pulled, and this host has no other image of that name."""
NEEDED_BYTES = 8_000_000_000
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class BundlePlan:
    """The contents of a bundle."""

    version: str
    platform: str
    builder: str
    base: str
    epoch_s: int
    """Time of every file, seconds since 1970."""

    @property
    def name(self) -> str:
        """Return the name of the file, without `.tar`, and of the folder in it."""
        return f"dlion-bundle-{self.version}-{self.platform.partition('/')[2]}"


def build_bundle(plan: BundlePlan, out: Path) -> Path:
    """Build the bundle in `out`; return its path. Nothing else stays there. Raises: BundleError."""
    out.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out).free
    if free < NEEDED_BYTES:
        raise BundleError(f"{out} has {free / 1e9:.1f} GB free; a bundle needs "
                          f"{NEEDED_BYTES / 1e9:.0f} GB while it is built")  # fmt: skip
    with tempfile.TemporaryDirectory(dir=out, prefix=".bundle-") as made:
        scratch, root = Path(made), Path(made) / plan.name
        for folder in ("images", "charts", "crds", "wheels", "sbom"):
            (root / folder).mkdir(parents=True)
        progress("chart and wheels")
        package_chart(root / "charts", plan.version, plan.epoch_s)
        for definition in ("dlionjob.yaml", "dlionruntime.yaml"):
            shutil.copyfile(ROOT / "crds" / definition, root / "crds" / definition)
        collect_wheels(root / "wheels", plan.platform, scratch)
        images = {target: _image(plan, target, root, scratch) for target in TARGETS}
        progress("the archive")
        return assemble(plan, images, root, out)


def assemble(plan: BundlePlan, images: Mapping[str, ImageFacts], root: Path, out: Path) -> Path:
    """Add metadata, installer and checksums to the parts in `root`, and write the bundle."""
    _write_texts(plan, images, root)
    _write_checksums(root)
    new = root.with_suffix(".part")
    files = [path for path in root.rglob("*") if path.is_file()]
    write_tar(new, [(str(p.relative_to(root.parent)), p) for p in files], plan.epoch_s)
    bundle = out / f"{plan.name}.tar"
    new.rename(bundle)
    bundle.with_name(f"{bundle.name}.sha256").write_text(f"{sha256_of(bundle)}  {bundle.name}\n")
    return bundle


def _image(plan: BundlePlan, target: str, root: Path, scratch: Path) -> ImageFacts:
    progress(f"image {target} ({plan.builder})")
    reference = f"{REGISTRY}/dlion-{target}:{plan.version}"
    layout = scratch / f"layout-{target}"
    request = BuildRequest(target, reference, plan.base, plan.platform)
    try:
        build_layout(plan.builder, request, layout)
    except BundleError as error:
        if plan.builder == "testbed":
            raise
        hint = "If no registry can be reached: BUILDER=testbed builds images for tests."
        raise BundleError(f"{error}\n{hint}") from None
    archive = root / "images" / f"{target}.tar"
    facts = write_image(layout, reference, archive, plan.epoch_s)
    shutil.rmtree(layout)
    if f"linux/{facts.architecture}" != plan.platform:
        raise BundleError(f"{reference} is for {facts.architecture}, not for {plan.platform}: "
                          f"does the base {plan.base} exist for it?")  # fmt: skip
    # buildah reuses a cached label if the same image was a base under another name.
    if facts.base != plan.base:
        raise BundleError(
            f"{reference} names {facts.base!r} as its base, not {plan.base!r}: the builder's cache "
            "holds a build with that name. Remove it, and build again"
        )
    write_sbom(archive, reference, root / "sbom" / f"{target}.cdx.json")
    return facts


def _write_texts(plan: BundlePlan, images: Mapping[str, ImageFacts], root: Path) -> None:
    facts = {
        "version": plan.version,
        "platform": plan.platform,
        "base": plan.base,
        "builder": plan.builder,
        "commit": _commit(),
        "sourceDateEpoch": str(plan.epoch_s),
    }
    for target, image in images.items():
        facts[f"{target}.reference"] = image.reference
        facts[f"{target}.digest"] = image.digest
        facts[f"{target}.unpackedBytes"] = str(image.unpacked_bytes)
    lines = [f"{key}: {value}\n" for key, value in facts.items()]
    (root / "bundle.yaml").write_text(
        "# What this bundle holds; read by install.sh.\n" + "".join(lines)
    )
    shutil.copyfile(_HERE / "install.sh", root / "install.sh")
    (root / "install.sh").chmod(0o755)
    text = (_HERE / "README.md").read_text()
    for key in ("version", "platform", "base"):
        text = text.replace(f"@{key}@", facts[key])
    if plan.builder == "testbed":
        text += "\n**For tests only**: the images hold settings of the machine that built them.\n"
    (root / "README.md").write_text(text)


def _write_checksums(root: Path) -> None:
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    lines = [f"{sha256_of(root / name)}  {name}\n" for name in names]
    (root / "checksums.txt").write_text("".join(lines))


def _commit() -> str:
    commit = _git("rev-parse", "HEAD")
    return f"{commit} with changes" if commit and _git("status", "--porcelain") else commit or "-"


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def source_date_epoch_s() -> int:
    """Return $SOURCE_DATE_EPOCH or the time of the last commit. Raises: BundleError."""
    given = os.environ.get("SOURCE_DATE_EPOCH") or _git("log", "-1", "--format=%ct") or "315532800"
    if (
        not given.isdecimal() or not 315532800 <= int(given) < 1 << 33
    ):  # a zip file has no time before 1980
        raise BundleError(f"SOURCE_DATE_EPOCH={given}: seconds since 1970, from 315532800 on")
    os.environ["SOURCE_DATE_EPOCH"] = given  # also for the wheel
    return int(given)


def progress(text: str) -> None:
    """Print the present step."""
    print(f"bundle: {text}", file=sys.stderr, flush=True)
