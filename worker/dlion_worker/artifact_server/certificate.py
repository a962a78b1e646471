"""The keeper's certificate, renewed at half of its lifetime; the key stays in memory.

If the job names the authority, it is renewed twice a minute. A running server uses a new
certificate from the next handshake on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import grpc

from dlion_api.errors import ContractError, UnavailableError
from dlion_worker.artifact_server.config import KeeperConfig
from dlion_worker.coordination import request_certificate
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey, renewal_due_s

_LOG = logging.getLogger(__name__)

MIN_RENEWAL_S = 1.0
NAMED_RENEWAL_S = 30.0
"""Renewal interval if the job names the authority.

That authority may be replaced at any time. Workers signed by the new one are trusted after this
time at most.
"""


class KeeperCertificate:
    def __init__(self, config: KeeperConfig, on_renewed: Callable[[], None]) -> None:
        """`on_renewed` is called when a certificate that was due has been replaced.

        Connections must then be reopened. It must not block.
        """
        self._config = config
        self._on_renewed = on_renewed
        self._stopped = threading.Event()
        self._credentials: WorkerCredentials | None = None
        self._is_new = False

    @property
    def enabled(self) -> bool:
        """Whether callers have to present a certificate."""
        return self._config.job.spec.tls.mode != "Disabled"

    def credentials(self) -> WorkerCredentials:
        """The newest credentials. Only this site's authority is trusted."""
        if self._credentials is None:
            assert not self.enabled, "asked for before it was obtained"
            return WorkerCredentials.insecure()
        return self._credentials

    def server(self) -> grpc.ServerCredentials | None:
        """Credentials for the port; None means plain text."""
        if not self.enabled:
            return None
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            self._renewed,  # type: ignore[arg-type]  # None means "unchanged" to gRPC
            require_client_authentication=True,
        )

    async def obtain(self) -> None:
        """Request a certificate, without a time limit.

        Raises: UnavailableError if stopped; ContractError if it is rejected permanently.
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
        self._is_new = True

    async def renew(self) -> None:
        """Renew until cancelled or stopped. Log a rejection and keep the old certificate."""
        reconnected_s = time.monotonic()
        while self.enabled and not self._stopped.is_set():
            due_s = self._due_s()
            await asyncio.sleep(self._renewal_s())
            try:
                await self.obtain()
                if time.monotonic() >= reconnected_s + due_s:
                    reconnected_s = time.monotonic()
                    _LOG.info("certificate renewed")
                    self._on_renewed()
            except (ContractError, UnavailableError) as error:
                _LOG.error("certificate not renewed: %s", error)
                await asyncio.sleep(60)

    def stop(self) -> None:
        self._stopped.set()

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        self._is_new = False
        credentials = self.credentials()
        return grpc.ssl_server_certificate_configuration(
            [credentials.key_and_chain()],
            root_certificates=b"\n".join(credentials.site_bundles_pem.values()),
        )

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """gRPC calls this at each handshake."""
        return self._configuration() if self._is_new else None

    def _renewal_s(self) -> float:
        is_named = self._config.job.spec.tls.mode != "Managed"
        return min(self._due_s(), NAMED_RENEWAL_S) if is_named else self._due_s()

    def _due_s(self) -> float:
        _, chain_pem = self.credentials().key_and_chain()
        return max(MIN_RENEWAL_S, renewal_due_s(chain_pem))
