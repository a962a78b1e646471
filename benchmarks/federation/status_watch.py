"""What a site's status says of a job, each change with the moment at which it was seen.

A `kubectl get --watch` in a thread for each site costs next to nothing while nothing changes, and
begins again where the site's API server went away. Used by the parts of `three_sites`.
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
    """Of one job at one site; times are this machine's monotonic clock."""

    def __init__(self, kubectl: Kubectl, job: str) -> None:
        self._command = [
            str(kubectl.program), f"--kubeconfig={kubectl.kubeconfig}",
            f"--namespace={kubectl.namespace}", "get", "dlj", job, "--watch", "-o", "json",
        ]  # fmt: skip
        self.seen: list[tuple[float, dict[str, Any]]] = []
        self._closing = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it; what was seen stays."""
        self._closing.set()
        if self._process is not None:
            self._process.terminate()
        self._thread.join(timeout=10)

    @property
    def status(self) -> dict[str, Any]:
        """The newest; empty before the first."""
        return self.seen[-1][1] if self.seen else {}

    @property
    def iteration(self) -> int:
        """Of the foremost worker of the whole job, as the newest status has it."""
        return max((each.get("iteration") or 0 for each in self.status.get("sites") or ()),
                   default=0)  # fmt: skip

    def turns(self, condition: str) -> list[tuple[float, bool]]:
        """The moments at which that condition became true or false, the first look among them."""
        found: list[tuple[float, bool]] = []
        for at_s, status in self.seen:
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
                    self.seen.append((time.monotonic(), document.get("status") or {}))
            self._closing.wait(_AGAIN_S)


def _documents(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """JSON objects that stand one below the other, each as soon as its last line is there."""
    text: list[str] = []
    for line in lines:
        text.append(line)
        if line.rstrip() == "}":  # what is nested is indented
            yield json.loads("".join(text))
            text.clear()


@contextmanager
def watched(sites: FederatedSites, job: str) -> Iterator[dict[str, StatusWatch]]:
    """A watch at each site."""
    with ExitStack() as closing:
        found = {}
        for site in sites.names:
            found[site] = StatusWatch(sites.kubectl(site), job)
            closing.callback(found[site].close)
        yield found
