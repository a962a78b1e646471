"""What a pod's status shows of its initializers. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.endings import describe_exit
from dlion_api.exit_codes import ExitCode
from dlion_api.spec.failures import WorkerEnd
from dlion_operator.model.job_view import Document, parse_time

_NAMES = (names.DATASET_INITIALIZER, names.MODEL_INITIALIZER)


@dataclass(frozen=True)
class InitializerEnd:
    """How an initializer failed."""

    name: str
    exit_code: int
    message: str

    def __str__(self) -> str:
        """Return the text for users, without the name of the pod."""
        lines = [line for line in self.message.splitlines() if line.strip()]
        return f"{self.name} ended with {describe_exit(self.exit_code, lines)}"


def running_initializer(pod: Document) -> str:
    """Return which initializer is at work, or about to begin after another. Empty: none."""
    if _phase(pod) != "Pending":
        return ""
    has_begun = False
    for name, state in _states(pod):
        ended = state.get("terminated")
        has_begun |= "running" in state or ended is not None
        if ended is None:
            return name if has_begun else ""
    return ""


def failed_initializer(pod: Document) -> InitializerEnd | None:
    """Return how an initializer failed the pod. None: none did."""
    if _phase(pod) != "Failed":
        return None
    for name, state in _states(pod):
        ended = state.get("terminated") or {}
        if code := ended.get("exitCode"):
            return InitializerEnd(name, int(code), str(ended.get("message") or ""))
    return None


def end_of_initializer(pod: Document) -> WorkerEnd | None:
    """Return the end of a worker whose initializer failed. None: none did, or on request."""
    ended = failed_initializer(pod)
    is_on_request = ended is None or ended.exit_code == ExitCode.INTERRUPTED
    return None if is_on_request else "InitializerFailed"


def initialized_at(pod: Document) -> datetime | None:
    """Return when its last initializer ended. None: none has ended."""
    ended = (state.get("terminated") or {} for _, state in _states(pod))
    times = (parse_time(each.get("finishedAt")) for each in ended)
    return max((time for time in times if time is not None), default=None)


def _phase(pod: Document) -> str:
    return str((pod.get("status") or {}).get("phase") or "Pending")


def _states(pod: Document) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for status in (pod.get("status") or {}).get("initContainerStatuses") or ():
        if status.get("name") in _NAMES:
            yield status["name"], status.get("state") or {}
