"""The request to serve a run. Pure."""

from dlion_operator.plan.decisions import OpenRun
from dlion_operator.plan.objects.exposure import addresses
from dlion_operator.plan.runs import Run


def open_run(run: Run) -> OpenRun:
    """Serve that run as its manifest and its objects are now."""
    return OpenRun(
        run.job,
        run.workers,
        run.spec_hash,
        age_s=run.age_s,
        failed=run.failed_ranks,
        addresses=addresses(run),
        authority=run.authority,
        kept_bundles=run.kept_bundles,
        revocations=run.own_revocations,
        kept_revocations=run.kept_revocations,
        job_uid=str(run.owner["uid"]),
    )
