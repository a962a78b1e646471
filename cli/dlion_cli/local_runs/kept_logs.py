"""The ends of workers' logs that a site's keeper has, for pods that are gone.

Used by `dlion logs`. They are unpacked into a temporary folder, and read as those of a run on
this machine.
"""

import contextlib
from collections.abc import Collection, Iterator
from typing import Final

from dlion_api.errors import ContractError, DataError, UnavailableError
from dlion_cli.cluster.cluster_jobs import JobClient
from dlion_cli.local_runs.run_logs import WorkerLogs
from dlion_cli.pod_streams.keeper_files import unpack_kept
from dlion_cli.pod_streams.log_sources import LogSelector
from dlion_cli.views.job_status import JobStatus
from dlion_local.temporary_folder import temporary_folder
from dlion_results.run_folder.layout import JOB, LOGS

_MAX_BYTES: Final = 1024 * 1024 * 1024
"""Maximum size of all logs; it fits those of 4,096 workers."""


@contextlib.contextmanager
def kept_logs(
    jobs: JobClient,
    job: JobStatus,
    run: str,
    selector: LogSelector,
    without: Collection[str] = (),
) -> Iterator[WorkerLogs]:
    """The selected workers' logs, except for those in `without` (`group-index`).

    They exist within the context. Raises: UnavailableError if the keeper has none of them, or
    cannot be read; DeniedError.
    """
    with temporary_folder() as folder:
        try:
            unpack_kept(jobs, job, run, folder, [JOB, LOGS], max_bytes=_MAX_BYTES)
        except (DataError, ContractError) as error:  # of the command in the pod
            raise UnavailableError(f"the keeper has no logs of run {run}: {error}") from error
        (folder / LOGS).mkdir(exist_ok=True)  # an empty one is not sent
        logs = WorkerLogs(
            folder, selector.container, selector.group, selector.worker, frozenset(without)
        )
        if not logs.files():
            raise UnavailableError(f"the keeper has no logs of these workers of run {run}")
        yield logs
