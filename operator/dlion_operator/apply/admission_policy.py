"""Read since when the site's ValidatingAdmissionPolicy has checked the rights of who writes jobs.

The operator cannot see who wrote a job; the API server can, at each write. The policy compares what
a job asks for with the rights of its writer. Its age is the proof: a job that is younger than the
policy and its binding has been compared. `reconcile` asks before it decides.
"""

import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

from dlion_operator.kubernetes.client import Document, Kind, KubernetesClient, RequestRefusedError
from dlion_operator.model.job_view import parse_time

_LOG = logging.getLogger(__name__)

READ_INTERVAL_S: Final = 30.0


class AdmissionPolicy:
    def __init__(
        self, cluster: KubernetesClient, name: str, monotonic_s: Callable[[], float]
    ) -> None:
        """`name` of the policy and of its binding; empty: there is none."""
        self._cluster = cluster
        self._name = name
        self._monotonic_s = monotonic_s
        self._since: datetime | None = None
        self._again_s = float("-inf")

    async def since(self, job: Document) -> datetime | None:
        """Return since when both are in force. None: they are not, or the job asks for nothing that
        depends on its writer's rights.

        Raises: ServerError, ConflictError.
        """
        if not self._name or not _depends_on_rights(job):
            return None
        if self._monotonic_s() >= self._again_s:
            self._since = await self._read()
            self._again_s = self._monotonic_s() + READ_INTERVAL_S
        return self._since

    async def _read(self) -> datetime | None:
        try:
            policy = await self._cluster.get(Kind.ADMISSION_POLICY, "", self._name)
            binding = await self._cluster.get(Kind.ADMISSION_POLICY_BINDING, "", self._name)
        except RequestRefusedError as error:
            _LOG.warning("the ValidatingAdmissionPolicy %s cannot be read: %s", self._name, error)
            return None
        if policy is None or binding is None or not _denies(policy, binding, self._name):
            return None
        times = [
            parse_time(each["metadata"].get("creationTimestamp")) for each in (policy, binding)
        ]
        known = [time for time in times if time is not None]
        return max(known) if len(known) == len(times) else None


def _denies(policy: Document, binding: Document, name: str) -> bool:
    bound = binding.get("spec") or {}
    fails = (policy.get("spec") or {}).get("failurePolicy", "Fail") == "Fail"
    denies = "Deny" in (bound.get("validationActions") or ())
    return fails and denies and bound.get("policyName") == name


def _depends_on_rights(job: Document) -> bool:
    """Whether the manifest, which may be invalid, has a podTemplate of job or group, or the Secret
    of a download."""
    spec = _mapping(job.get("spec"))
    owners = [spec]
    sites = spec.get("sites")
    for site in sites if isinstance(sites, list) else ():
        groups = _mapping(site).get("groups")
        owners += groups if isinstance(groups, list) else []
    initializer = _mapping(_mapping(spec.get("trainer")).get("initializer"))
    downloads = (initializer.get("dataset"), initializer.get("model"))
    has_template = any(_mapping(each).get("podTemplate") for each in owners)
    return has_template or any(_mapping(each).get("secretName") for each in downloads)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
