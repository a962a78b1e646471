"""What the API server has not let be made of what leads other sites to workers: each is left alone
for a while, and the status says it meanwhile (`exposure`).

Owned by `carrying_out`, for one DLionJob.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from dlion_api.errors import DLionError
from dlion_operator.cluster import ConflictError, Kind

FORBIDDEN_AGAIN_S: Final = 60.0
CONFLICT_AGAIN_S: Final = 10.0
"""An object that holds the name is on its way out: to look whether it is gone costs little."""

ObjectKey = tuple[Kind, str]
"""Kind and name."""


@dataclass(frozen=True)
class Unmade:
    """What leads other sites to a worker, where the API server does not let it be made."""

    message: str
    is_there: bool
    """Whether there is one in an earlier form."""


@dataclass(frozen=True)
class _Failure:
    digest: str
    exposes: str
    again_s: float
    unmade: Unmade


class Attempts:
    """Those that failed, until they are made."""

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._failures: dict[ObjectKey, _Failure] = {}

    def is_due(self, key: ObjectKey, digest: str) -> bool:
        """Whether to ask for it: it is another than was asked for, or that was a while ago."""
        failure = self._failures.get(key)
        is_same = failure is not None and failure.digest == digest
        return failure is None or not is_same or self._monotonic_s() >= failure.again_s

    def failed(
        self, key: ObjectKey, digest: str, exposes: str, error: DLionError, *, is_there: bool
    ) -> None:
        """`exposes`: the worker's Service that it is or belongs to; `is_there`: in some form."""
        wait_s = CONFLICT_AGAIN_S if isinstance(error, ConflictError) else FORBIDDEN_AGAIN_S
        unmade = Unmade(str(error), is_there)
        self._failures[key] = _Failure(digest, exposes, self._monotonic_s() + wait_s, unmade)

    def succeeded(self, key: ObjectKey) -> None:
        """It is as it should be."""
        self._failures.pop(key, None)

    def unmade(self) -> Mapping[str, Unmade]:
        """By the name of the worker's Service; of several things, one that is not there."""
        found: dict[str, Unmade] = {}
        for failure in self._failures.values():
            known = found.get(failure.exposes)
            if known is None or known.is_there:
                found[failure.exposes] = failure.unmade
        return found
