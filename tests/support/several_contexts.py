"""`dlion get|watch|logs --contexts` of several real clusters: one kubeconfig, and the commands."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from testbed.kubectl import Kubectl


class SeveralContexts:
    """One context for each cluster, in the namespace of its kubectl."""

    def __init__(self, clusters: Mapping[str, Kubectl], folder: Path) -> None:
        merged: dict[str, list[Any]] = {"clusters": [], "users": [], "contexts": []}
        for name, kubectl in clusters.items():
            known = yaml.safe_load(kubectl.kubeconfig.read_text())
            own = {"cluster": name, "user": name, "namespace": kubectl.namespace}
            merged["clusters"].append({**known["clusters"][0], "name": name})
            merged["users"].append({**known["users"][0], "name": name})
            merged["contexts"].append({"name": name, "context": own})
        self._file = folder / "several-contexts.yaml"
        self._file.write_text(yaml.safe_dump(merged))
        self._names = ",".join(clusters)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """`dlion WORDS` of all of them."""
        command = [sys.executable, "-m", "dlion_cli", *words, f"--kubeconfig={self._file}"]
        return subprocess.Popen(
            [*command, f"--contexts={self._names}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def said(self, *words: str) -> list[str]:
        """The lines of `dlion WORDS`, which must succeed."""
        return ended(self.start(*words), within_s=60)


def ended(command: subprocess.Popen[str], *, within_s: float) -> list[str]:
    """Its lines, once it has succeeded; killed where it takes longer."""
    try:
        said, complained = command.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        command.kill()
        command.communicate()
        raise
    assert command.returncode == 0, complained
    return said.splitlines()
