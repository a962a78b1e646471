"""Read the Secret with a job's authority (`spec.tls.mode` `Secret` and `CertManager`).

`reconcile` calls it before it decides, with one object per DLionJob. The Secret is polled by name,
not watched, because the operator may read no other Secrets. While the API server is unavailable,
the last content stays in use.
"""

import base64
import binascii
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from dlion_api.cluster_names import JOB_LABEL, authority_name
from dlion_api.errors import ContractError, SpecError
from dlion_api.names import JobKey, SiteName
from dlion_api.spec import load_job
from dlion_operator.kubernetes.client import (
    Document,
    Kind,
    KubernetesClient,
    RequestRefusedError,
    ServerError,
)
from dlion_operator.model import settings as site_settings
from dlion_operator.model.job_view import condition
from dlion_operator.pki.authority_secret import CERTIFICATE_KEY, PRIVATE_KEY
from dlion_operator.pki.certificate_issuer import Issuer
from dlion_operator.pki.job_authority import issuer_of
from dlion_operator.pki.named_authority import NAMED_MODES, NamedAuthority

_LOG = logging.getLogger(__name__)

READ_INTERVAL_S: Final = 30.0
RETRY_S: Final = 5.0
"""Interval while there is no valid authority, which may be created at any time."""
MAX_DATA_BYTES: Final = 64 * 1024
"""Per key of the Secret."""
CERT_MANAGER_ANNOTATION: Final = "cert-manager.io/certificate-name"
"""Annotation of Secrets that cert-manager manages."""


@dataclass(frozen=True)
class _SecretReference:
    """A Secret's name, and the run that uses it."""

    job: JobKey
    name: str
    is_issued: bool
    """Whether cert-manager creates it, for the Certificate of the same name."""

    @property
    def granted_by(self) -> str:
        """The chart value that grants the operator read access."""
        return "set tls.certManager" if self.is_issued else "name it in tls.secretNames"


class NamedSecret:
    """The authority in one job's Secret, as last read."""

    def __init__(
        self,
        cluster: KubernetesClient,
        settings: site_settings.Settings,
        *,
        now: Callable[[], datetime],
        monotonic_s: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._site = SiteName(settings.site)
        self._life = timedelta(seconds=settings.authority.certificate_life_seconds)
        self._now = now
        self._monotonic_s = monotonic_s
        self._wanted: _SecretReference | None = None
        self._data: object = None
        """The content that `_issuer` was made from."""
        self._issuer: Issuer | None = None
        self._problem = ""
        self._again_s = float("-inf")
        self._missing_since_s: float | None = None

    async def read(self, document: Document) -> NamedAuthority | None:
        """Return the authority; None: the job names no Secret, or does not run at this site."""
        wanted = self._of(document)
        if wanted is None:
            return None
        if wanted != self._wanted:
            self._wanted, self._data, self._issuer, self._problem = wanted, None, None, ""
            self._again_s, self._missing_since_s = float("-inf"), None
        if self._monotonic_s() >= self._again_s:
            await self._read(wanted)
        return self._result()

    def _result(self) -> NamedAuthority:
        now_s = self._monotonic_s()
        if not self._problem:
            self._missing_since_s = None
            return NamedAuthority(self._issuer)
        if self._missing_since_s is None:
            self._missing_since_s = now_s
        return NamedAuthority(None, self._problem, now_s - self._missing_since_s)

    async def _read(self, wanted: _SecretReference) -> None:
        before = self._problem
        what = f"Secret {wanted.job.namespace}/{wanted.name}"
        try:
            secret = await self._cluster.get(Kind.SECRET, wanted.job.namespace, wanted.name)
            if secret is None and wanted.is_issued:
                raise ContractError(await self._why_not_issued(wanted))
            self._take(secret, wanted)
            self._problem = ""
        except ContractError as error:
            self._problem = f"{what}: {error}"
        except RequestRefusedError as error:
            advice = f"{wanted.granted_by} in the values of this site's chart"
            self._problem = f"this site's operator may not read {what}: {advice} ({error})"
        except ServerError as error:
            if self._issuer is None:
                self._problem = f"{what} cannot be read yet: {error}; retrying"
        wait_s = RETRY_S if self._problem else READ_INTERVAL_S
        self._again_s = self._monotonic_s() + wait_s
        if self._problem and self._problem != before:
            _LOG.warning("run %s: %s", wanted.job, self._problem)

    def _take(self, secret: Document | None, wanted: _SecretReference) -> None:
        """Take the Secret's content. Raises: ContractError if it is invalid."""
        if secret is None:
            raise ContractError(
                "does not exist: create it in the job's namespace, of type kubernetes.io/tls, with"
                " certificate (tls.crt) and key (tls.key) of the authority"
            )
        kept_for = (secret["metadata"].get("annotations") or {}).get(CERT_MANAGER_ANNOTATION)
        if wanted.is_issued and kept_for != wanted.name:
            raise ContractError(
                f"is not cert-manager's for Certificate {wanted.name}: delete or rename it"
            )
        labels = secret["metadata"].get("labels") or {}
        if labels.get(JOB_LABEL, wanted.job.name) != wanted.job.name:
            raise ContractError(
                f"belongs to job {labels[JOB_LABEL]}: name another in tls.secretName"
            )
        data = (_decoded(secret, CERTIFICATE_KEY), _decoded(secret, PRIVATE_KEY))
        issuer = self._issuer
        if data == self._data and issuer and self._now() < issuer.certificate.not_valid_after_utc:
            return
        self._issuer, self._data = None, data
        self._issuer = issuer_of(
            *data, life=self._life, job=wanted.job, site=self._site, now=self._now()
        )

    async def _why_not_issued(self, wanted: _SecretReference) -> str:
        """Return why cert-manager has not issued it. Raises: RequestRefusedError, ServerError."""
        namespace = wanted.job.namespace
        certificate = await self._cluster.get(Kind.CERTIFICATE, namespace, wanted.name)
        if certificate is None:
            return (
                f"does not exist, nor does Certificate {wanted.name}, which the operator creates:"
                " is cert-manager installed? Is tls.certManager set in the values of this site's"
                " chart? See the job's events"
            )
        reason = condition(certificate, "Ready").get("message")
        text = f"is not issued by cert-manager yet: {reason or 'it has no status so far'}"
        return f"{text}; see `kubectl describe certificate {wanted.name}`"

    def _of(self, document: Document) -> _SecretReference | None:
        spec = document.get("spec")
        tls = spec.get("tls") if isinstance(spec, dict) else None
        if not isinstance(tls, dict) or tls.get("mode") not in NAMED_MODES:
            return None
        try:
            job = load_job(document)
        except SpecError:
            return None  # reported in the job's status
        if self._site not in {site.name for site in job.spec.sites}:
            return None
        name = job.spec.tls.secret_name
        return _SecretReference(job.key, name or authority_name(job.key), is_issued=name is None)


def _decoded(secret: Document, key: str) -> bytes:
    text = (secret.get("data") or {}).get(key)
    if not isinstance(text, str):
        raise ContractError(f"lacks {key}: put certificate (tls.crt) and key (tls.key) there")
    try:
        content = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise ContractError(f"{key} is not base64") from error
    if len(content) > MAX_DATA_BYTES:
        raise ContractError(f"{key} is longer than {MAX_DATA_BYTES} bytes")
    return content
