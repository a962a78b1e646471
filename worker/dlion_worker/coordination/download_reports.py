"""Reports to the coordinator how much an init container has downloaded.

A report that fails is dropped, as a later one replaces it: a download never waits for the operator.
"""

import logging
from pathlib import Path
from typing import Final

import grpc

from dlion_api.names import JobKey, WorkerIdentity
from dlion_api.wire import coordination_pb2
from dlion_worker.coordination.channel import (
    Caller,
    CoordinatorAccess,
    coordination_stub,
    failure_of,
    open_channel,
)

TIMEOUT_S: Final = 5.0
_LOG = logging.getLogger(__name__)


class DownloadReports:
    """The reports of one init container."""

    def __init__(
        self, config: CoordinatorAccess, job: JobKey, worker: WorkerIdentity, container: str
    ) -> None:
        """Raises: OSError (the authority's file cannot be read)."""
        self._caller = Caller(job, worker, Path(config.token_path))
        self._container = container
        self._channel = open_channel(config)
        self._stub = coordination_stub(self._channel)
        self._call: grpc.Future[coordination_pb2.DownloadReply] | None = None

    def send(self, done_bytes: int, total_bytes: int | None) -> None:
        """Send a report, unless the one before is still under way; return at once."""
        if self._call is not None and not self._call.done():
            return
        try:
            report = coordination_pb2.DownloadReport(
                run=str(self._caller.job),
                worker=self._caller.wire_worker(),
                token=self._caller.token(),
                container=self._container,
                done_bytes=done_bytes,
                total_bytes=total_bytes or 0,
            )
        except OSError as error:
            _LOG.warning("progress is not reported: %s", failure_of(error).message)
            return
        self._call = self._stub.ReportDownload.future(report, timeout=TIMEOUT_S)

    def close(self) -> None:
        self._channel.close()
