"""Obtains the trainer's certificate, and replaces it at half of its lifetime.

Owns the renewing thread, which also re-establishes every connection that uses the certificate.
Exchange and coordination hand over what is in transit; no iteration waits. Called by `worker`.
"""

import logging
import math
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import JobKey, SiteName
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.reasons import EventReason
from dlion_api.spec import Job
from dlion_worker.coordination import CoordinationClient
from dlion_worker.coordination.backoff import JITTER
from dlion_worker.security.credential_store import (
    MIN_LIFE_LEFT,
    load_checkpoint_key,
    load_credentials,
    store_checkpoint_key,
    store_credentials,
)
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey
from dlion_worker.trainer.background.dataset_watcher import EventSink
from dlion_worker.trainer.signal_handler import Interrupted

_LOG = logging.getLogger(__name__)

REFUSED_RETRY_S = 60.0
"""Delay after the coordinator refuses a request."""

SIGNING_TIMEOUT_S = 10.0
"""Longest wait for a new certificate while the stored one is still valid."""

JITTER_FRACTION = 0.1
"""Renewals start up to this fraction early, so that workers do not all ask at once."""


def initial_credentials(
    config: WorkerConfig,
    job: Job,
    coordination: CoordinationClient,
    *,
    is_restart: bool,
    interrupted: Callable[[], bool],
) -> WorkerCredentials:
    """Load an earlier process's credentials if usable, or obtain new ones. None without TLS.

    If the stored certificate is due for renewal and the coordinator is unavailable, it is used
    until it expires; `CertificateRenewer` replaces it later. Raises: Interrupted (before the
    coordinator answered), ContractError (the coordinator refuses this worker), OSError (the
    credentials cannot be stored).
    """
    if job.spec.tls.mode == "Disabled":
        return WorkerCredentials.insecure()
    stored = _stored(config, job.key, MIN_LIFE_LEFT) if is_restart else None
    if stored is not None:
        return stored
    key = WorkerKey()
    if is_restart:
        stored = _stored(config, job.key, 0.0)
    wait_s = math.inf if stored is None else SIGNING_TIMEOUT_S
    try:
        signed = coordination.sign(csr_pem=key.csr_pem(), stopped=interrupted, wait_s=wait_s)
    except UnavailableError as error:
        if stored is None or interrupted():
            raise Interrupted(str(error)) from error
        _LOG.warning("continues with the stored certificate: %s", error)
        return stored
    credentials = WorkerCredentials(key, signed.chain_pem, signed.site_bundles_pem)
    credentials.checkpoint_key = signed.checkpoint_key
    # First: where there are credentials, a missing key means that the coordinator gave none.
    store_checkpoint_key(config.proof_dir, config.rank, signed.checkpoint_key)
    store_credentials(config.state_dir, job.key, credentials)
    return credentials


def _stored(config: WorkerConfig, job: JobKey, min_life_left: float) -> WorkerCredentials | None:
    stored = load_credentials(config.state_dir, job, min_life_left=min_life_left)
    if stored is not None:
        stored.checkpoint_key = load_checkpoint_key(config.proof_dir, config.rank)
    return stored


class CertificateRenewer:
    """Keeps one worker's certificate and trusted authorities up to date."""

    def __init__(
        self,
        config: WorkerConfig,
        job: JobKey,
        *,
        credentials: WorkerCredentials,
        coordination: CoordinationClient,
        migrate_links: Callable[[], None],
        trust_changed: Callable[[], None],
        report: EventSink,
    ) -> None:
        """`migrate_links` is called for each new certificate, `trust_changed` for new bundles;
        neither may block."""
        self._config, self._job = config, job
        self._credentials = credentials
        self._coordination = coordination
        self._remake_links = migrate_links
        self._trust_changed = trust_changed
        self._report = report
        self._storing = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="certificate-renewal", daemon=True)

    def start(self) -> None:
        """Start renewing, if there is a certificate."""
        if self._credentials.enabled:
            self._thread.start()

    def close(self) -> None:
        """End the thread, and a request in progress."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def trust(self, site_bundles_pem: Mapping[SiteName, bytes]) -> None:
        """Use these bundles to verify sites from now on. From any thread."""
        if self._credentials.trust(site_bundles_pem):
            self._store()
            self._trust_changed()

    def _store(self) -> None:
        """Store them on disk; on failure the old ones remain."""
        try:
            with self._storing:
                store_credentials(self._config.state_dir, self._job, self._credentials)
        except OSError as error:
            _LOG.warning("new certificate or bundles are not stored on disk: %s", error)

    def _run(self) -> None:
        wait_s = _with_jitter(self._credentials.renewal_due_s(now=datetime.now(UTC)))
        while not self._ended.wait(wait_s):
            wait_s = self._renew()

    def _renew(self) -> float:
        """Obtain a new certificate and use it everywhere; return seconds until the next attempt."""
        key = WorkerKey()
        due_s = self._credentials.renewal_due_s()
        try:
            # Reported again after each failed wait; the coordinator may be unavailable.
            signed = self._coordination.sign(
                csr_pem=key.csr_pem(), stopped=self._ended.is_set, wait_s=due_s / 2
            )
        except (UnavailableError, ContractError) as error:
            if not self._ended.is_set():
                self._report(EventReason.CERTIFICATE_NOT_RENEWED, str(error), warning=True)
            return REFUSED_RETRY_S if isinstance(error, ContractError) else 0.0
        self.trust(signed.site_bundles_pem)
        self._credentials.renew(key, signed.chain_pem)
        self._store()
        self._remake_links()
        try:
            self._coordination.renew_connection()
        except OSError as error:
            _LOG.warning("the connection to the coordinator keeps the old certificate: %s", error)
        message = f"renewal {self._credentials.renewals}: connections are remade with it"
        self._report(EventReason.CERTIFICATE_RENEWED, message)
        return _with_jitter(self._credentials.renewal_due_s())


def _with_jitter(seconds: float) -> float:
    return seconds * JITTER.uniform(1 - JITTER_FRACTION, 1)
