"""The rendered chart, and helm with its own folders.

This module does not judge. helm is the testbed's (tests/support/testbed) or the one on the PATH.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dlion_api.errors import UnavailableError
from dlion_api.names import SiteName
from dlion_operator.pki.authority import CertificateAuthority
from testbed.binaries import built

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from testbed.kubectl import Kubectl
    from testbed.project_images import ProjectImage

CHART = Path(__file__).parents[2] / "helm" / "dlion"
RELEASE, NAMESPACE = "dlion", "dlion-system"
SITE: Mapping[str, Any] = {"site": {"name": "plant-a"}}
"""The minimal values."""
GATEWAY: Mapping[str, Any] = {
    "gateway": {"address": "plant-a.example:443", "parent": {"name": "edge"}}
}
"""A proxy in front of the site, configured by TLSRoutes."""
_OFFLINE = ("--kube-version", "1.34.0")
"""A helm built by `go install` assumes version 1.20 for a cluster that it cannot query."""


def helm_program() -> Path | None:
    """Return the testbed's helm, else the one on the PATH."""
    binaries = built()
    if binaries is not None:
        return binaries.path("helm")
    found = shutil.which("helm")
    return Path(found) if found else None


@dataclass(frozen=True)
class Helm:
    """helm, isolated from its user's configuration; with a cluster if one is given."""

    program: Path
    home: Path
    kubectl: Kubectl | None = None

    def run(self, *arguments: str, values: Mapping[str, Any] | None = None) -> str:
        """Return what helm prints. Raises: UnavailableError with helm's output."""
        command = [str(self.program), *arguments, *self._cluster()]
        if values is not None:
            command += ["--values", "-"]
        done = subprocess.run(
            command,
            input=json.dumps(values),
            env={**os.environ, **self._environment()},
            capture_output=True,
            text=True,
            check=False,
            timeout=330,  # helm's own is five minutes, and its error names what it waited for
        )
        if done.returncode != 0:
            raise UnavailableError(f"helm {arguments[0]}: {done.stderr.strip()} {done.stdout}")
        return done.stdout

    def objects(
        self, values: Mapping[str, Any] = SITE, *, release: str = RELEASE, only: str = ""
    ) -> list[dict[str, Any]]:
        """The rendered objects; `only` names one template."""
        text = _rendered(self, json.dumps(values), release)
        if only:
            mark = f"# Source: {CHART.name}/templates/{only}\n"
            documents = re.split(r"^---\n", text, flags=re.MULTILINE)
            text = "---\n".join(each for each in documents if each.startswith(mark))
        return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]

    def lint(self, values: Mapping[str, Any]) -> None:
        """Raises: UnavailableError with helm's complaints."""
        self.run("lint", "--strict", str(CHART), *_OFFLINE, values=values)

    def one(self, kind: str, values: Mapping[str, Any] = SITE, *, only: str) -> dict[str, Any]:
        """The only object of that kind that a template renders."""
        (found,) = [each for each in self.objects(values, only=only) if each["kind"] == kind]
        return found

    def _cluster(self) -> list[str]:
        if self.kubectl is None:
            return []
        cluster = [f"--kubeconfig={self.kubectl.kubeconfig}"]
        cluster += [f"--kube-context={self.kubectl.context}"] if self.kubectl.context else []
        return cluster

    def _environment(self) -> dict[str, str]:
        folders = {f"HELM_{kind}_HOME": str(self.home / kind) for kind in
                   ("CACHE", "CONFIG", "DATA")}  # fmt: skip
        if self.kubectl:
            return folders
        # helm ends within a tenth of a second; garbage collection would take a third of that.
        return folders | {"KUBECONFIG": os.devnull, "GOGC": "off"}


@functools.lru_cache(maxsize=256)  # many tests use the same
def _rendered(helm: Helm, values: str, release: str) -> str:
    """Render all templates, as helm does even if it shows only one."""
    command = ["template", release, str(CHART), "--namespace", NAMESPACE, *_OFFLINE]
    return helm.run(*command, values=json.loads(values))


@functools.cache
def bundle(site: str) -> str:
    """Return the public certificate of that site's authority: the same in every call."""
    return CertificateAuthority(SiteName(site)).bundle_pem.decode()


def entry(site: str, **changes: Any) -> dict[str, Any]:
    """Return the site's entry in `sites`."""
    return {"name": site, "address": f"{site}.example:8446", "bundle": bundle(site)} | changes


def sites(*names: str) -> dict[str, Any]:
    """Values with these sites."""
    return {"sites": [entry(name) for name in names]}


def image_values(images: Iterable[ProjectImage]) -> dict[str, Any]:
    """Values with these images, which the nodes have."""
    values: dict[str, Any] = {"pullPolicy": "Never"}
    for image in images:
        repository, _, tag = image.reference.partition(":")
        values[image.target.value] = {"repository": repository, "tag": tag}
    return {"images": values}


def merged(*documents: Mapping[str, Any]) -> dict[str, Any]:
    """Merge values as helm does: mappings by key, other values by the last one."""
    whole: dict[str, Any] = {}
    for document in documents:
        for key, value in document.items():
            old = whole.get(key)
            if isinstance(old, dict) and isinstance(value, dict):
                value = merged(old, value)
            whole[key] = value
    return whole


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return `{"a": {"b": value}}` for `a.b`."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)
