"""A whole keeper: folder, records, certificate and port, in the order of start and end.

Called by `dlion_worker.pod`. Ends in order on SIGTERM and SIGINT; what it has kept stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

import grpc
import grpc.aio

from dlion_api.addresses import joined
from dlion_api.errors import UnavailableError
from dlion_worker.keeper.certificate import KeeperCertificate
from dlion_worker.keeper.config import KeeperConfig
from dlion_worker.keeper.following import Follower
from dlion_worker.keeper.recorder import Recorder
from dlion_worker.keeper.refusals import Refusals
from dlion_worker.keeper.service import KeepingService
from dlion_worker.keeper.store import Store
from dlion_worker.keeper.workers import SiteWorkers
from dlion_worker.keeping.pieces import MAX_MESSAGE_BYTES

_LOG = logging.getLogger(__name__)

MOST_CALLS = 256
"""Each worker brings one file at a time; the rest is for those that come again after a break."""

TELL_EVERY_S = 3.0
"""Whom it has refused."""

GRACE_S = 2.0
"""What a call that is under way has to end when the keeper is told to."""

_OPTIONS = (
    # A little more than the protocol allows, so that such a message is refused by name.
    ("grpc.max_receive_message_length", 2 * MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)


def run(config: KeeperConfig) -> None:
    """Keeps until it is told to end.

    Raises: UnavailableError where the folder is another keeper's or the port cannot be had;
        OSError where the disk cannot be written; ContractError where the coordinator refuses
        this keeper for good.
    """
    recorder = Recorder(config.folder, config.job)
    refusals = Refusals()
    follower = Follower(config, recorder, refusals)
    try:
        follower.start()
        asyncio.run(_serve(config, follower, refusals))
    finally:
        follower.close()
        recorder.close()


async def _serve(config: KeeperConfig, follower: Follower, refusals: Refusals) -> None:
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, stopped.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    certificate = KeeperCertificate(config, follower.remake)
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
    server = await _listening(config, certificate, refusals)
    beside = [
        asyncio.create_task(each) for each in (certificate.renew(), _tell(refusals, follower))
    ]
    await stopped.wait()
    certificate.stop()
    for task in beside:
        task.cancel()
    await server.stop(GRACE_S)


async def _tell(refusals: Refusals, follower: Follower) -> None:
    """Has the coordinator hear of those who were refused, soon and not one by one."""
    told = refusals.counts()
    while True:
        await asyncio.sleep(TELL_EVERY_S)
        if (counts := refusals.counts()) != told:
            told = counts
            follower.remake()


async def _listening(
    config: KeeperConfig, certificate: KeeperCertificate, refusals: Refusals
) -> grpc.aio.Server:
    workers = SiteWorkers(config.folder, config.job, config.site)
    store = Store(config.folder)
    if torn := store.clear():
        _LOG.info("%d files that had not come to their end are removed", torn)
    service = KeepingService(config.job.key, workers, store, certificate.credentials, refusals)
    server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MOST_CALLS)
    server.add_generic_rpc_handlers((service.handler(),))
    address, secure = joined(config.listen_host, config.port), certificate.server()
    try:
        if secure is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, secure)
    except RuntimeError as error:
        raise UnavailableError(f"keeper cannot listen on {address}: {error}") from error
    await server.start()
    _LOG.info("keeping the files of %s at %s in %s", config.site, address, config.folder)
    return server
