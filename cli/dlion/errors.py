"""The errors that this package raises: all are `DLionError`s, with the exit code of `dlion`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_api.errors import (
    AbsentError,
    DataError,
    DeniedError,
    DivergedError,
    DLionError,
    ProgramError,
    SpecError,
    UnavailableError,
)
from dlion_api.exit_codes import ExitCode

if TYPE_CHECKING:
    from dlion.job import JobSnapshot

__all__ = [
    "AbsentError",
    "DLionError",
    "DataError",
    "DeniedError",
    "DivergedError",
    "JobEndedError",
    "JobTimeoutError",
    "ProgramError",
    "SpecError",
    "UnavailableError",
]


class JobEndedError(DLionError):
    """A job has ended in another state than the wanted ones; `job` is its last snapshot.

    `exit_code` is that of `dlion run` or `dlion watch`, as far as the job's reason shows; never 0.
    """

    def __init__(self, job: JobSnapshot, wanted: str) -> None:
        why = f": {job.message}" if job.message else ""
        super().__init__(
            f"job {job.name} has ended as {job.state} ({job.reason}), not as {wanted}{why}. "
            f"get_job_logs({job.name!r}) has what its workers printed"
        )
        self.job = job
        self.exit_code = _exit_code(job.reason)


def _exit_code(reason: str) -> ExitCode:
    """The code with which `dlion` ends for a job of that reason, local or of a cluster."""
    from dlion_cli.views.job_status import FAILURE_CODES
    from dlion_results.summary.judgement import EndReason

    codes = {str(EndReason.of(code)): code for code in ExitCode}
    codes |= {str(of_cluster): code for of_cluster, code in FAILURE_CODES.items()}
    code = ExitCode.FAILED if reason == EndReason.FAILED else codes.get(reason, ExitCode.FAILED)
    return code or ExitCode.FAILED  # a job that has succeeded where another end was waited for


class JobTimeoutError(DLionError, TimeoutError):
    """A job was in none of the wanted states in time; it continues. A retry may help."""

    exit_code = ExitCode.DEADLINE

    def __init__(self, job: JobSnapshot, wanted: str, timeout_s: float) -> None:
        super().__init__(
            f"job {job.name} is {job.state}, and was not {wanted} within {timeout_s:g} s. It goes "
            f"on: wait again, or delete_job({job.name!r})"
        )
        self.job = job
