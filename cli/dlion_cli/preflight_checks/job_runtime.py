"""Whether a site's DLionRuntime allows what a job asks there, for `dlion preflight -f`.

The operator's own rules decide (`dlion_operator.plan.runtime_limits`).
"""

from datetime import UTC, datetime
from typing import Any

from dlion_api.document import parse, to_document
from dlion_api.errors import AbsentError, ContractError, DLionError, SpecError
from dlion_api.spec import Job
from dlion_api.spec.sites import Site
from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from dlion_cli.preflight_checks.site_checks import query_error_check
from dlion_cli.preflight_checks.site_cluster import OperatorSnapshot, SiteCluster
from dlion_operator.model.settings import Settings
from dlion_operator.model.site_runtime import RuntimeState, SiteRuntime
from dlion_operator.plan.observed import Observed
from dlion_operator.plan.runs import Run
from dlion_operator.plan.runtime_limits import runtime_blocker

_ANY_TIME = datetime(2000, 1, 1, tzinfo=UTC)
"""The limits do not depend on it."""


def runtime_checks(cluster: SiteCluster, site: Site, job: Job) -> list[Check]:
    """The check of the runtime that the job uses at this site. Empty: it uses none."""
    operator, found = cluster.operator, cluster.runtime
    if isinstance(operator, DLionError) or found is None:
        return []
    name = operator.runtime_of(job.spec.runtime)
    runtimes = f"kubectl -n {cluster.namespace} get dlionruntimes"
    if isinstance(found, AbsentError):
        observed = f"there is no DLionRuntime {name} in namespace {cluster.namespace}"
        advice = f"Have its administrators create it, or name another (spec.runtime): {runtimes}"
        return [Check(site.name, "runtime", CheckOutcome.FAIL, observed, advice)]
    if isinstance(found, DLionError):
        return [query_error_check(site.name, "runtime", found)]
    try:
        runtime = SiteRuntime.of(name, found.get("spec") or {})
    except (SpecError, ContractError) as error:
        observed = f"DLionRuntime {name} cannot be used: {error}"
        advice = f"Have its administrators correct it, or name another (spec.runtime): {runtimes}"
        return [Check(site.name, "runtime", CheckOutcome.FAIL, observed, advice)]
    try:
        refused = _refusal(job, operator, runtime)
    except SpecError as error:
        observed = f"not verified against DLionRuntime {name}: the operator's settings: {error}"
        return [Check(site.name, "runtime", CheckOutcome.UNKNOWN, observed)]
    if not refused:
        observed = f"DLionRuntime {name} allows what the job asks"
        return [Check(site.name, "runtime", CheckOutcome.OK, observed)]
    advice = f"Change the job so, or name another DLionRuntime (spec.runtime): {runtimes}"
    return [Check(site.name, "runtime", CheckOutcome.FAIL, refused, advice)]


def _refusal(job: Job, operator: OperatorSnapshot, runtime: SiteRuntime) -> str:
    """What the operator would report. Empty: nothing. Raises: SpecError."""
    settings = parse(Settings, operator.settings, unknown=[])
    document: dict[str, Any] = to_document(job)
    document["metadata"] |= {"uid": "", "generation": 1}
    observed = Observed(
        document=document,
        jobs=(),
        pods=(),
        services=(),
        now=_ANY_TIME,
        authority_pem="",
        runtime=RuntimeState(runtime),
    )
    refusal = runtime_blocker(Run.of(job, observed, settings))
    return "" if refusal is None else refusal.message
