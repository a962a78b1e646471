"""`dlion get|watch|logs --contexts` with several real clusters: one kubeconfig, and the
commands."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
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

    def at(self, name: str, *words: str) -> str:
        """The output of a successful `dlion WORDS` for that context alone."""
        command = [sys.executable, "-m", "dlion_cli", *words, f"--kubeconfig={self._file}"]
        done = subprocess.run(
            [*command, f"--context={name}"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextmanager
    def started(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Start `dlion WORDS` for all contexts; it ends with the block at the latest."""
        command = [sys.executable, "-m", "dlion_cli", *words, f"--kubeconfig={self._file}"]
        process = subprocess.Popen(
            [*command, f"--contexts={self._names}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def output(self, *words: str) -> list[str]:
        """The lines of a successful `dlion WORDS` for all contexts."""
        with self.started(*words) as process:
            return ended(process, within_s=60)


def ended(process: subprocess.Popen[str], *, within_s: float) -> list[str]:
    """Wait for success; return the lines."""
    output, complained = process.communicate(timeout=within_s)
    assert process.returncode == 0, complained
    return output.splitlines()
