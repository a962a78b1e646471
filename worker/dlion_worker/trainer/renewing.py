"""The certificate of a worker's trainer: asked for at the start, and replaced at half of its life
while it trains, with every connection that goes by it.

Owns the thread that does so. Called by `worker`. What of a connection is under way when it is
remade is the exchange's and the coordination's business: no iteration waits for it.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import JobKey, SiteName
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_api.worker_config import WorkerConfig
from dlion_worker.coordination import CoordinationClient
from dlion_worker.credentials import WorkerCredentials, WorkerKey, renewal_due_s
from dlion_worker.kept_credentials import keep_changed, keep_credentials, kept_credentials
from dlion_worker.trainer.interruption import Interrupted

_LOG = logging.getLogger(__name__)

REFUSED_AGAIN_S = 60.0
"""Between two requests that the coordinator refuses."""

SIGNED_WITHIN_S = 10.0
"""A new certificate, where the one that was kept still holds; after that the kept one will do."""

SPREAD = 0.1
"""Workers that began together ask within so much of the time before."""

Report = Callable[[EventReason, str, bool], None]
"""Takes a reason, a message, and whether it is a warning."""


def first_credentials(
    config: WorkerConfig,
    job: Job,
    coordination: CoordinationClient,
    *,
    came_back: bool,
    interrupted: Callable[[], bool],
) -> WorkerCredentials:
    """Those that an earlier process kept, where they will do, or new ones; none without TLS.

    Where the kept ones are due to be replaced and the coordinator is away, they will do to their
    end: `Renewing` replaces them as soon as it is back.

    Raises:
        Interrupted: before the coordinator answered.
        ContractError: the coordinator refuses this worker.
        OSError: they cannot be kept.
    """
    if job.spec.tls.mode == "Disabled":
        return WorkerCredentials.insecure()
    kept = kept_credentials(config.state_dir, job.key) if came_back else None
    if kept is not None:
        return kept
    key = WorkerKey()
    if came_back:
        kept = kept_credentials(config.state_dir, job.key, least_life_left=0.0)
    wait_s = None if kept is None else SIGNED_WITHIN_S
    try:
        signed = coordination.sign(key.csr_pem(), "trainer", stopped=interrupted, wait_s=wait_s)
    except UnavailableError as error:
        if kept is None or interrupted():
            raise Interrupted(str(error)) from error
        _LOG.warning("goes on with the certificate that was kept: %s", error)
        return kept
    credentials = WorkerCredentials(key, signed.chain_pem, signed.site_bundles_pem)
    keep_credentials(config.state_dir, job.key, credentials)
    return credentials


class Renewing:
    """Keeps one worker's certificate, and whom it trusts, up to date."""

    def __init__(
        self,
        config: WorkerConfig,
        job: JobKey,
        *,
        credentials: WorkerCredentials,
        coordination: CoordinationClient,
        remake_links: Callable[[], None],
        trust_changed: Callable[[], None],
        report: Report,
    ) -> None:
        """`remake_links` and `trust_changed` hear of each new certificate, and of other bundles;
        neither may block."""
        self._config, self._job = config, job
        self._credentials = credentials
        self._coordination = coordination
        self._remake_links = remake_links
        self._trust_changed = trust_changed
        self._report = report
        self._keeping = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dlion-renewing", daemon=True)

    def start(self) -> None:
        """Begins to renew, if there is a certificate."""
        if self._credentials.enabled:
            self._thread.start()

    def close(self) -> None:
        """Ends the thread, and a request that is under way."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def trust(self, site_bundles_pem: Mapping[SiteName, bytes]) -> None:
        """Sites are known by these bundles from now on. From any thread."""
        if self._credentials.trust(site_bundles_pem):
            self._keep()
            self._trust_changed()

    def _keep(self) -> None:
        with self._keeping:
            keep_changed(self._config.state_dir, self._job, self._credentials)

    def _run(self) -> None:
        _, chain_pem = self._credentials.shown()
        wait_s = _spread(renewal_due_s(chain_pem, now=datetime.now(UTC)))
        while not self._ended.wait(wait_s):
            wait_s = self._renew()

    def _renew(self) -> float:
        """Has a new certificate signed and taken up everywhere; seconds until the next attempt."""
        key = WorkerKey()
        due_s = renewal_due_s(self._credentials.shown()[1])
        try:
            # Told again whenever so much time has passed in vain; the coordinator may be away.
            signed = self._coordination.sign(
                key.csr_pem(), "trainer", stopped=self._ended.is_set, wait_s=due_s / 2
            )
        except (UnavailableError, ContractError) as error:
            if not self._ended.is_set():
                self._report(EventReason.CERTIFICATE_NOT_RENEWED, str(error), True)
            return REFUSED_AGAIN_S if isinstance(error, ContractError) else 0.0
        self.trust(signed.site_bundles_pem)
        self._credentials.renew(key, signed.chain_pem)
        self._keep()
        self._remake_links()
        try:
            self._coordination.renew_connection()
        except OSError as error:
            _LOG.warning("the connection to the coordinator stays as it is: %s", error)
        words = f"renewal {self._credentials.renewals}: connections are remade with it"
        self._report(EventReason.CERTIFICATE_RENEWED, words, False)
        return _spread(renewal_due_s(signed.chain_pem))


def _spread(seconds: float) -> float:
    return seconds * random.uniform(1 - SPREAD, 1)  # noqa: S311 - no secret
