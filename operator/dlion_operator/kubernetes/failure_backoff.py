"""Back-off for objects that expose workers and that the API server does not accept."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from dlion_api.errors import DLionError
from dlion_operator.kubernetes.client import ConflictError, Kind

FORBIDDEN_RETRY_S: Final = 60.0
CONFLICT_RETRY_S: Final = 10.0
"""An object with that name is being deleted: checking whether it is gone is cheap."""

ObjectKey = tuple[Kind, str]


@dataclass(frozen=True)
class FailedObject:
    """An object for exposing a worker that could not be applied."""

    message: str
    exists: bool
    """Whether there is an earlier version of it."""


@dataclass(frozen=True)
class _FailureRecord:
    digest: str
    exposes: str
    retry_at_s: float
    failed_object: FailedObject


class FailureBackoff:
    """Failed objects, until they are applied."""

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._failures: dict[ObjectKey, _FailureRecord] = {}

    def is_due(self, key: ObjectKey, digest: str) -> bool:
        """Whether to try now: the object has changed, or its back-off is over."""
        failure = self._failures.get(key)
        is_same = failure is not None and failure.digest == digest
        return failure is None or not is_same or self._monotonic_s() >= failure.retry_at_s

    def record_failure(
        self, key: ObjectKey, digest: str, exposes: str, error: DLionError, *, exists: bool
    ) -> None:
        """Record a failure. `exposes`: the worker's Service; `exists`: in some version."""
        wait_s = CONFLICT_RETRY_S if isinstance(error, ConflictError) else FORBIDDEN_RETRY_S
        failed_object = FailedObject(str(error), exists)
        self._failures[key] = _FailureRecord(
            digest, exposes, self._monotonic_s() + wait_s, failed_object
        )

    def record_success(self, key: ObjectKey) -> None:
        self._failures.pop(key, None)

    def failed_objects(self) -> Mapping[str, FailedObject]:
        """Failed objects by worker Service. Of several objects, one that does not exist."""
        by_service: dict[str, FailedObject] = {}
        for failure in self._failures.values():
            known = by_service.get(failure.exposes)
            if known is None or known.exists:
                by_service[failure.exposes] = failure.failed_object
        return by_service
