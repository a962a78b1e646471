"""The Applications that Argo CD generates from ApplicationSets, by its own Go code.

The sources of the program, in `applications/`, define its input and output.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gitops.programs import GoProgram, output_of

APPLICATIONS = GoProgram("applications")
NAMESPACE = "argocd"


@dataclass(frozen=True)
class Cluster:
    """A cluster that Argo CD knows."""

    name: str
    labels: Mapping[str, str]

    def secret(self) -> dict[str, Any]:
        """The Secret that registers it in Argo CD."""
        labels = {"argocd.argoproj.io/secret-type": "cluster", **self.labels}
        server = f"https://{self.name}.example:6443"
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": f"cluster-{self.name}", "namespace": NAMESPACE, "labels": labels},
            "data": {"name": _base64(self.name), "server": _base64(server)},
        }


def applications(
    program: Path, files: Iterable[Path], clusters: Iterable[Cluster]
) -> dict[str, list[dict[str, Any]]]:
    """Return the Applications of each ApplicationSet in the files, by its name.

    Raises: ValueError with Argo CD's complaint.
    """
    secrets = json.dumps([cluster.secret() for cluster in clusters])
    made: dict[str, list[dict[str, Any]]] = json.loads(output_of(program, files, secrets))
    return made


def _base64(text: str) -> str:
    return b64encode(text.encode()).decode()
