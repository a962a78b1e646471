"""Starts and stops a whole keeper: folder, record stream, certificate and port.

Ends in order on SIGTERM and SIGINT; stored files remain.
"""

import asyncio
import contextlib
import logging
import signal

import grpc
import grpc.aio

from dlion_api.addresses import join_host_port
from dlion_api.errors import UnavailableError
from dlion_api.protocol.port_limits import connection_options
from dlion_worker.artifact_client.chunks import MAX_MESSAGE_BYTES
from dlion_worker.artifact_server.certificate import KeeperCertificate
from dlion_worker.artifact_server.config import KeeperConfig
from dlion_worker.artifact_server.provenance_signer import ProvenanceSigner
from dlion_worker.artifact_server.record_stream import RecordStream
from dlion_worker.artifact_server.recorder import Recorder
from dlion_worker.artifact_server.service import (
    MAX_CALLS_OF_CALLER,
    ArtifactService,
    UploadRejections,
)
from dlion_worker.artifact_server.store import ArtifactStore
from dlion_worker.artifact_server.workers import RevokedWorkers, SiteWorkerRegistry

_LOG = logging.getLogger(__name__)

MAX_CALLS = 256
"""Each worker uploads one file at a time; the rest is for those that reconnect after a break."""

MAX_CONNECTIONS = 4096
"""Trainers and sidecars of one site; those without a call for a while are closed."""

REPORT_INTERVAL_S = 3.0
"""How often new rejections are reported."""

GRACE_S = 2.0
"""Time for a call to finish when the keeper stops."""

_OPTIONS = (
    # Somewhat above the protocol's limit, so that our own check reports such a message.
    ("grpc.max_receive_message_length", 2 * MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
    *connection_options(MAX_CONNECTIONS, max_calls_per_connection=MAX_CALLS_OF_CALLER),
)


def run(config: KeeperConfig) -> None:
    """Serve until a signal.

    Raises: UnavailableError if the folder is locked by another keeper or the port is taken; OSError
    if the disk is not writable; ContractError if the coordinator rejects this keeper permanently.
    """
    recorder = Recorder(config.folder, config.job)
    rejections = UploadRejections()
    revoked = RevokedWorkers(config.folder, is_over=recorder.is_over)
    records = RecordStream(config, recorder, rejections, revoked)
    try:
        records.start()
        asyncio.run(_serve(config, records, rejections, revoked))
    finally:
        records.close()
        recorder.close()


async def _serve(
    config: KeeperConfig,
    records: RecordStream,
    rejections: UploadRejections,
    revoked: RevokedWorkers,
) -> None:
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, stopped.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    certificate = KeeperCertificate(config, records.reconnect)
    obtaining = asyncio.create_task(certificate.obtain())
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait({obtaining, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if stopped.is_set():
        certificate.stop()
        with contextlib.suppress(UnavailableError):
            await obtaining
        return
    stopping.cancel()
    await obtaining
    server = await _start_server(config, certificate, rejections, revoked)
    tasks = [
        asyncio.create_task(each)
        for each in (certificate.renew(), _report_rejections(rejections, records))
    ]
    await stopped.wait()
    certificate.stop()
    for task in tasks:
        task.cancel()
    await server.stop(GRACE_S)


async def _report_rejections(rejections: UploadRejections, records: RecordStream) -> None:
    """Report rejections to the coordinator soon, several at a time."""
    reported = rejections.counts()
    while True:
        await asyncio.sleep(REPORT_INTERVAL_S)
        if (counts := rejections.counts()) != reported:
            reported = counts
            records.reconnect()


def make_server(service: ArtifactService) -> grpc.aio.Server:
    """Return a server of this service, without a port. Call it in the loop that will run it."""
    server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
    server.add_generic_rpc_handlers((service.handler(),))
    return server


async def _start_server(
    config: KeeperConfig,
    certificate: KeeperCertificate,
    rejections: UploadRejections,
    revoked: RevokedWorkers,
) -> grpc.aio.Server:
    workers = SiteWorkerRegistry(config.folder, config.job, config.site)
    store = ArtifactStore(config.folder)
    if partial := store.remove_partial():
        _LOG.info("removed %d incomplete files", partial)
    credentials = certificate.credentials
    signer = ProvenanceSigner(
        config.job.key, config.job_uid, config.site, config.folder, credentials, revoked
    )
    service = ArtifactService(
        config.job.key, workers, store, credentials, rejections, revoked, signer
    )
    server = make_server(service)
    address = join_host_port(config.listen_host, config.port)
    try:
        certificate.credentials.add_port(server, address)
    except RuntimeError as error:
        raise UnavailableError(f"keeper cannot listen on {address}: {error}") from error
    await server.start()
    _LOG.info("storing the files of %s at %s in %s", config.site, address, config.folder)
    return server
