"""The keeper's certificate, renewed at half of its lifetime; the key stays in memory.

If the job names the authority, it is renewed twice a minute. A running server uses a new
certificate from the next handshake on.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from dlion_api.errors import ContractError, UnavailableError
from dlion_worker.artifact_server.config import KeeperConfig
from dlion_worker.coordination import request_certificate
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey

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
        self._tls_mode = config.job.spec.tls.mode
        self.credentials = WorkerCredentials.insecure()
        """Insecure until `obtain`, if a certificate is required. Only this site's authority is
        trusted."""

    async def obtain(self) -> None:
        """Request a certificate, without a time limit.

        Raises: UnavailableError if stopped; ContractError if it is rejected permanently.
        """
        if self._tls_mode == "Disabled":
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
        if self.credentials.enabled:
            self.credentials.trust(own)
            self.credentials.renew(key, signed.chain_pem)
        else:
            self.credentials = WorkerCredentials(key, signed.chain_pem, own)

    async def renew(self) -> None:
        """Renew until cancelled or stopped. Log a rejection and keep the old certificate."""
        reconnected_s = time.monotonic()
        while self.credentials.enabled and not self._stopped.is_set():
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

    def _renewal_s(self) -> float:
        due_s = self._due_s()
        return due_s if self._tls_mode == "Managed" else min(due_s, NAMED_RENEWAL_S)

    def _due_s(self) -> float:
        return max(MIN_RENEWAL_S, self.credentials.renewal_due_s())
