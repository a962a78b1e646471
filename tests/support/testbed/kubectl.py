"""kubectl for the tests: one cluster with an explicit kubeconfig, never the user's own."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlion_api.errors import UnavailableError
from testbed.reader import reader_of

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Kubectl:
    """kubectl with one kubeconfig and, if given, one of its contexts and a namespace."""

    program: Path
    kubeconfig: Path
    context: str = ""
    namespace: str = ""

    def run(self, *arguments: str, text: str = "", timeout_s: float = 60) -> str:
        """Return kubectl's output. Raises: UnavailableError with its error."""
        command = [str(self.program), f"--kubeconfig={self.kubeconfig}"]
        command += [f"--context={self.context}"] if self.context else []
        command += [f"--namespace={self.namespace}"] if self.namespace else []
        try:
            done = subprocess.run(
                [*command, *arguments],
                input=text,
                env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise UnavailableError(
                f"kubectl {' '.join(arguments)}: no answer within {timeout_s:g} s"
            ) from None
        if done.returncode != 0:
            raise UnavailableError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, *arguments: str) -> Any:
        """Return the parsed output of `kubectl get ... -o json`. Raises: UnavailableError with its
        error."""
        reader = reader_of(self.kubeconfig, self.context)
        found = reader.get(arguments, self.namespace) if reader else None
        if found is not None:
            return found
        return json.loads(self.run("get", *arguments, "-o", "json"))

    def knows(self, kind: str) -> bool:
        """Whether the API server serves that kind, as it does some time after its CRD is
        created."""
        reader = reader_of(self.kubeconfig, self.context)
        if reader is not None and "." not in kind:
            return reader.get((kind, "--all-namespaces"), self.namespace) is not None
        try:
            self.run("get", kind, "--all-namespaces", "--output=name")
        except UnavailableError:
            return False
        return True

    def wait_until_known(self, *kinds: str, timeout_s: float = 60) -> None:
        """Wait until the API server serves all these kinds.

        `kubectl wait` does not suffice: it fails at once on a definition without conditions.
        Raises: UnavailableError that names a kind not served in time.
        """
        deadline_s = time.monotonic() + timeout_s
        for kind in kinds:
            while not self.knows(kind):
                if time.monotonic() > deadline_s:
                    raise UnavailableError(f"{kind}: not served within {timeout_s:g} s")
                time.sleep(0.25)

    def apply(self, *documents: dict[str, Any]) -> None:
        """Run `kubectl apply` with these documents together."""
        together = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        self.run("apply", "-f", "-", text=json.dumps(together))

    def wait(self, *arguments: str, timeout_s: float = 60) -> None:
        """Run `kubectl wait ...`. Raises: UnavailableError if the condition is not met in time."""
        self.run("wait", f"--timeout={timeout_s:g}s", *arguments, timeout_s=timeout_s + 10)
