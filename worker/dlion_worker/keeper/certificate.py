"""The keeper's certificate: asked for with its token, renewed when half of its life is over, or
twice a minute where the job names the authority.

Owns the key, which stays in memory. Called by `process`. A running server takes the new one at the
next handshake; calls that are under way go on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import grpc

from dlion_api.errors import ContractError, UnavailableError
from dlion_worker.coordination import request_certificate
from dlion_worker.credentials import WorkerCredentials, WorkerKey, renewal_due_s
from dlion_worker.keeper.config import KeeperConfig

_LOG = logging.getLogger(__name__)

SOONEST_RENEWAL_S = 1.0
NAMED_RENEWAL_S = 30.0
"""Of an authority that the job names, which may be replaced at any time: workers that it signs for
afterwards are believed so soon."""


class KeeperCertificate:
    """The newest credentials, and the loop that renews them."""

    def __init__(self, config: KeeperConfig, renewed: Callable[[], None]) -> None:
        """`renewed` hears of a certificate that takes the place of one half of whose life is over,
        so that connections are to be remade; it must not block."""
        self._config = config
        self._told = renewed
        self._stopped = threading.Event()
        self._credentials: WorkerCredentials | None = None
        self._is_news = False

    @property
    def enabled(self) -> bool:
        """Whether callers have to prove who they are."""
        return self._config.job.spec.tls.mode != "Disabled"

    def credentials(self) -> WorkerCredentials:
        """The newest ones. Callers' certificates are held against this site's authority alone."""
        if self._credentials is None:
            assert not self.enabled, "asked for before it was obtained"
            return WorkerCredentials.insecure()
        return self._credentials

    def server(self) -> grpc.ServerCredentials | None:
        """For the port; None: plain text."""
        if not self.enabled:
            return None
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            self._renewed,  # type: ignore[arg-type]  # None is "unchanged", says gRPC
            require_client_authentication=True,
        )

    async def obtain(self) -> None:
        """Asks for one, for as long as it takes.

        Raises: UnavailableError when stopped; ContractError where it is refused for good.
        """
        if not self.enabled:
            return
        config, key = self._config, WorkerKey()
        signed = await asyncio.to_thread(
            request_certificate,
            config,
            job=config.job.key,
            worker=config.identity,
            csr_pem=key.csr_pem(),
            role="keeper",
            stopped=self._stopped.is_set,
        )
        own = {config.site: signed.site_bundles_pem[config.site]}
        self._credentials = WorkerCredentials(key, signed.chain_pem, own)
        self._is_news = True

    async def renew(self) -> None:
        """Renews until it is cancelled or stopped. A refusal is logged; the old one stands."""
        remade_s = time.monotonic()
        while self.enabled and not self._stopped.is_set():
            due_s = self._due_s()
            await asyncio.sleep(self._renewal_s())
            try:
                await self.obtain()
                if time.monotonic() >= remade_s + due_s:
                    remade_s = time.monotonic()
                    _LOG.info("certificate renewed")
                    self._told()
            except (ContractError, UnavailableError) as error:
                _LOG.error("certificate not renewed: %s", error)
                await asyncio.sleep(60)

    def stop(self) -> None:
        """Ends a request that is under way."""
        self._stopped.set()

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        self._is_news = False
        credentials = self.credentials()
        return grpc.ssl_server_certificate_configuration(
            [credentials.shown()],
            root_certificates=b"\n".join(credentials.site_bundles_pem.values()),
        )

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Asked by gRPC at each handshake."""
        return self._configuration() if self._is_news else None

    def _renewal_s(self) -> float:
        is_named = self._config.job.spec.tls.mode != "Managed"
        return min(self._due_s(), NAMED_RENEWAL_S) if is_named else self._due_s()

    def _due_s(self) -> float:
        _, chain_pem = self.credentials().shown()
        return max(SOONEST_RENEWAL_S, renewal_due_s(chain_pem))
