"""Record each change of a job's status at a site, with its time.

A `kubectl get --watch` in a thread for each site costs almost nothing while nothing changes. It is
restarted when the site's API server went away. The parts of `three_sites` use it.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from federated_sites import FederatedSites

    from testbed.kubectl import Kubectl

_AGAIN_S = 1.0


class StatusWatch:
    """A watch of one job at one site; times are of this machine's monotonic clock."""

    def __init__(self, kubectl: Kubectl, job: str) -> None:
        self._command = [
            str(kubectl.program), f"--kubeconfig={kubectl.kubeconfig}",
            f"--namespace={kubectl.namespace}", "get", "dlj", job, "--watch", "-o", "json",
        ]  # fmt: skip
        self.statuses: list[tuple[float, dict[str, Any]]] = []
        self._closing = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch; the recorded statuses stay."""
        self._closing.set()
        if self._process is not None:
            self._process.terminate()
        self._thread.join(timeout=10)

    @property
    def status(self) -> dict[str, Any]:
        """Return the newest status; empty before the first."""
        return self.statuses[-1][1] if self.statuses else {}

    @property
    def iteration(self) -> int:
        """Return the iteration of the foremost worker of the whole job in the newest status."""
        return max((each.get("iteration") or 0 for each in self.status.get("sites") or ()),
                   default=0)  # fmt: skip

    def turns(self, condition: str) -> list[tuple[float, bool]]:
        """Return when that condition became true or false, including its first value."""
        found: list[tuple[float, bool]] = []
        for at_s, status in self.statuses:
            holds = any(each["type"] == condition and each["status"] == "True"
                        for each in status.get("conditions") or ())  # fmt: skip
            if not found or found[-1][1] != holds:
                found.append((at_s, holds))
        return found

    def _watch(self) -> None:
        while not self._closing.is_set():
            with subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            ) as process:
                self._process = process
                if self._closing.is_set():
                    process.terminate()
                assert process.stdout is not None
                for document in _documents(process.stdout):
                    self.statuses.append((time.monotonic(), document.get("status") or {}))
            self._closing.wait(_AGAIN_S)


def _documents(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield successive JSON objects, each as soon as its last line arrives."""
    text: list[str] = []
    for line in lines:
        text.append(line)
        if line.rstrip() == "}":  # nested lines are indented
            yield json.loads("".join(text))
            text.clear()


@contextmanager
def watched(sites: FederatedSites, job: str) -> Iterator[dict[str, StatusWatch]]:
    """Start a watch at each site."""
    with ExitStack() as closing:
        found = {}
        for site in sites.names:
            found[site] = StatusWatch(sites.kubectl(site), job)
            closing.callback(found[site].close)
        yield found
