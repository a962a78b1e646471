"""The Secret with the authority that a job names, or that cert-manager keeps for it, read now and
then (`spec.tls.mode` `Secret` and `CertManager`).

Called by `reconcile` before it decides; one object for each DLionJob. It is read by its name, never
watched: the operator may see no other Secret. What cannot be read now stays as it was.
"""

from __future__ import annotations

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
from dlion_operator import settings as site_settings
from dlion_operator.authority_secret import CERTIFICATE_KEY, PRIVATE_KEY
from dlion_operator.cluster import Cluster, Document, Kind, RefusedError, ServerError
from dlion_operator.issuing import Issuer
from dlion_operator.job_authority import NamedAuthority, issuer_of
from dlion_operator.run_trust import NAMED_MODES

_LOG = logging.getLogger(__name__)

READ_EVERY_S: Final = 30.0
AGAIN_S: Final = 5.0
"""While there is no authority: somebody may be putting it there just now."""
MAX_DATA_BYTES: Final = 64 * 1024
"""Of either key of the Secret."""
KEPT_FOR: Final = "cert-manager.io/certificate-name"
"""Annotation of Secrets that cert-manager keeps."""


@dataclass(frozen=True)
class _Wanted:
    """Which Secret, for which run."""

    job: JobKey
    name: str
    is_issued: bool
    """Whether cert-manager makes it, for the Certificate of its name."""

    @property
    def granted_by(self) -> str:
        """What in the chart's values lets the operator read it."""
        return "set tls.certManager" if self.is_issued else "name it in tls.secretNames"


class NamedSecret:
    """What one job's Secret holds, as it was read last."""

    def __init__(
        self,
        cluster: Cluster,
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
        self._wanted: _Wanted | None = None
        self._data: object = None
        """What `_issuer` was made of."""
        self._issuer: Issuer | None = None
        self._problem = ""
        self._again_s = float("-inf")
        self._missing_since_s: float | None = None

    async def look(self, document: Document) -> NamedAuthority | None:
        """What there is of it; None: the job names no Secret, or not for this site."""
        wanted = self._of(document)
        if wanted is None:
            return None
        if wanted != self._wanted:
            self._wanted, self._data, self._issuer, self._problem = wanted, None, None, ""
            self._again_s, self._missing_since_s = float("-inf"), None
        if self._monotonic_s() >= self._again_s:
            await self._read(wanted)
        return self._found()

    def _found(self) -> NamedAuthority:
        now_s = self._monotonic_s()
        if not self._problem:
            self._missing_since_s = None
            return NamedAuthority(self._issuer)
        if self._missing_since_s is None:
            self._missing_since_s = now_s
        return NamedAuthority(None, self._problem, now_s - self._missing_since_s)

    async def _read(self, wanted: _Wanted) -> None:
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
        except RefusedError as error:
            advice = f"{wanted.granted_by} in the values of this site's chart"
            self._problem = f"{what} may not be read by this site's operator: {advice} ({error})"
        except ServerError as error:
            if self._issuer is None:
                self._problem = f"{what} cannot be read yet: {error}; tried again"
        wait_s = AGAIN_S if self._problem else READ_EVERY_S
        self._again_s = self._monotonic_s() + wait_s
        if self._problem and self._problem != before:
            _LOG.warning("run %s: %s", wanted.job, self._problem)

    def _take(self, secret: Document | None, wanted: _Wanted) -> None:
        """Raises: ContractError where that will not do."""
        if secret is None:
            raise ContractError(
                "is not there: make it in the job's namespace, of type kubernetes.io/tls, with"
                " certificate (tls.crt) and key (tls.key) of the authority"
            )
        kept_for = (secret["metadata"].get("annotations") or {}).get(KEPT_FOR)
        if wanted.is_issued and kept_for != wanted.name:
            raise ContractError(
                f"is not what cert-manager keeps for Certificate {wanted.name}: delete or rename it"
            )
        labels = secret["metadata"].get("labels") or {}
        if labels.get(JOB_LABEL, wanted.job.name) != wanted.job.name:
            raise ContractError(
                f"is that of job {labels[JOB_LABEL]}: name another in tls.secretName, or make one"
            )
        data = (_decoded(secret, CERTIFICATE_KEY), _decoded(secret, PRIVATE_KEY))
        if data == self._data and self._issuer is not None:
            ends = self._issuer.certificate.not_valid_after_utc
            if self._now() < ends:
                return
        self._issuer, self._data = None, data
        self._issuer = issuer_of(
            *data, life=self._life, job=wanted.job, site=self._site, now=self._now()
        )

    async def _why_not_issued(self, wanted: _Wanted) -> str:
        """Raises: RefusedError, ServerError."""
        namespace = wanted.job.namespace
        certificate = await self._cluster.get(Kind.CERTIFICATE, namespace, wanted.name)
        if certificate is None:
            return (
                f"is not there, and neither is Certificate {wanted.name}, which the operator makes:"
                " is cert-manager installed? Is tls.certManager set in the values of this site's"
                " chart? The job's events say more"
            )
        conditions = (certificate.get("status") or {}).get("conditions") or ()
        said = next((c.get("message") for c in conditions if c.get("type") == "Ready"), None)
        words = f"is not issued by cert-manager yet: {said or 'it has said nothing so far'}"
        return f"{words}; see `kubectl describe certificate {wanted.name}`"

    def _of(self, document: Document) -> _Wanted | None:
        spec = document.get("spec")
        tls = spec.get("tls") if isinstance(spec, dict) else None
        if not isinstance(tls, dict) or tls.get("mode") not in NAMED_MODES:
            return None
        try:
            job = load_job(document)
        except SpecError:
            return None  # the status says so
        if self._site not in {site.name for site in job.spec.sites}:
            return None
        name = job.spec.tls.secret_name
        return _Wanted(job.key, name or authority_name(job.key), is_issued=name is None)


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
