"""The DLionRuntime that a job uses at this site: as it is now, and as its run keeps it. Pure.

A run's Jobs carry what they were made with, so that a change or deletion of the runtime affects no
run that has begun.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dlion_api.cluster_names import RUNTIME_ANNOTATION
from dlion_api.document import parse, to_document
from dlion_api.errors import ContractError, SpecError
from dlion_api.spec import RuntimeSpec
from dlion_operator.model.job_view import WorkerJobView

MAX_BYTES: Final = 64 * 1024
"""Maximum size of a runtime as JSON: Kubernetes allows 256 KiB for all annotations of an object."""


@dataclass(frozen=True)
class SiteRuntime:
    """A DLionRuntime of this site."""

    name: str
    spec: RuntimeSpec

    @classmethod
    def of(cls, name: str, spec: object) -> "SiteRuntime":
        """Parse the spec of an object, of a newer definition perhaps.

        Raises: SpecError if it is invalid; ContractError if it is too long.
        """
        runtime = cls(name, parse(RuntimeSpec, spec, root="spec", unknown=[]))
        if (length := len(runtime.to_json())) > MAX_BYTES:
            raise ContractError(f"has {length} bytes as JSON; allowed: at most {MAX_BYTES}")
        return runtime

    def excess(self, workers: int) -> str:
        """What is wrong with so many workers at this site. Empty: nothing."""
        limit = self.spec.limits.max_workers
        if limit is None or workers <= limit:
            return ""
        return f"{workers} workers wanted, DLionRuntime {self.name} allows {limit}"

    def to_json(self) -> str:
        """The annotation of a run's Jobs."""
        document = {"name": self.name, "spec": to_document(self.spec, without_defaults=True)}
        return json.dumps(document, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True)
class RuntimeState:
    """What is known of the runtime that a job names."""

    runtime: SiteRuntime | None = None
    """None: the job uses none, or there is a problem."""
    problem: str = ""
    """Why it cannot be used, with what to do. Empty: nothing prevents it."""
    missing_s: float = 0.0
    """How long the problem has lasted."""


def kept_runtime(jobs: Iterable[WorkerJobView]) -> SiteRuntime | None:
    """The runtime that a run's Jobs were made with. None: without one."""
    text = next(filter(None, (job.annotations.get(RUNTIME_ANNOTATION) for job in jobs)), "")
    try:
        values: Mapping[str, Any] = json.loads(text or "null") or {}
        return SiteRuntime.of(str(values["name"]), values["spec"])
    except (ValueError, TypeError, KeyError, RecursionError, SpecError, ContractError):
        return None  # annotations can be edited
