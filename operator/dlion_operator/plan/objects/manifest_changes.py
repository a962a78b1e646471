"""Invalid manifests, and manifests that are changed before their run trains. Pure.

An invalid manifest ends no run: `decide` reports the problem. If the manifest changes before the
workers train, the run's objects are created again.
"""

from collections.abc import Iterator
from datetime import timedelta

from dlion_api import cluster_names as names
from dlion_api.errors import Problem
from dlion_api.status import Reason
from dlion_operator.children.template_limits import RefusedField, refusal_message
from dlion_operator.children.worker_jobs import missing_parts, refused_by_site, worker_job
from dlion_operator.kubernetes.client import Kind
from dlion_operator.model.job_view import WorkerJobView, parse_time
from dlion_operator.model.manifest_digest import manifest_digest
from dlion_operator.pki.pod_security import restricted_violations
from dlion_operator.plan.decisions import Action, CloseRun, Delete
from dlion_operator.plan.objects.garbage_collection import delete_run_objects
from dlion_operator.plan.observed import Observed, first_of
from dlion_operator.plan.outcome.diagnosis import join_messages
from dlion_operator.plan.outcome.job_phases import Diagnosis, JobPhase
from dlion_operator.plan.outcome.training_history import has_trained, may_miss_workers
from dlion_operator.plan.runs import Run

MAX_LISTED_FIELDS = 3
POLICY_SETTLE_TIME = timedelta(seconds=30)
"""Time until every API server enforces a new admission policy."""


def is_manifest_changed(run: Run) -> bool:
    """Whether the manifest has changed since this run's Jobs were created, and no worker has
    trained."""
    if run.attempt > 1 and run.status.get("trainingStartTime"):
        return False  # an earlier attempt has trained: a new keeper may lack its checkpoints
    made_from = run.manifest_digest
    if not made_from or made_from == manifest_digest(run.job):
        return False
    return not has_trained(run) and not may_miss_workers(run)


def recreate_objects(run: Run) -> Iterator[Action]:
    """Delete the run's objects except its claim. The next pass creates them from the new
    manifest."""
    yield CloseRun()  # workers of the new manifest have another hash
    for view in run.jobs.values():
        yield Delete(Kind.JOB, view.name, view.uid)
    yield from delete_run_objects(run.job.key, run.observed, run.settings)


RECREATING = Diagnosis(
    JobPhase.WAITING,
    Reason.WORKERS_STARTING,
    "the manifest has changed before the workers train: the run's objects are created again",
)


def start_refusal(run: Run) -> Diagnosis | None:
    """Why no pod may be made for this run here, or from the podTemplate of job and group. None: it
    may.

    Our CRD leaves podTemplate free in form, so the API server cannot validate it.
    """
    tenancy, namespace = run.settings.tenancy, run.job.key.namespace
    if namespace in tenancy.excluded_namespaces:
        message = (
            f"this site runs no jobs in namespace {namespace}: create the job in another one, or"
            " have this site's administrators change tenancy.excludedNamespaces"
        )
        return Diagnosis(JobPhase.STUCK, Reason.NAMESPACE_EXCLUDED, message)
    missing: set[str] = set()
    wrong: set[str] = set()
    refused: set[RefusedField] = set()
    rights_note = _rights_note(run)
    what = "podTemplate"
    if run.runtime is not None and run.runtime.spec.pod_template:
        what += f", with that of DLionRuntime {run.runtime.name},"
    for group in run.groups:
        try:
            made = worker_job(run.job, group, run.settings, run.owner)
            missing |= set(missing_parts(run.job, made))
            wrong |= set(restricted_violations(made["spec"]["template"]["spec"]))
            refused |= set(
                refused_by_site(run.job, group, made, run.settings, by_rights=rights_note is None)
            )
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            message = f"{what} is not a valid pod template, for group {group.name}: {error}"
            return Diagnosis(JobPhase.STUCK, Reason.INVALID_SPEC, message)
    if missing:
        message = f"{what} removes what makes a pod a worker: {'; '.join(sorted(missing))}"
        return Diagnosis(JobPhase.STUCK, Reason.INVALID_SPEC, message)
    if wrong:
        message = f"{what} violates pod security `restricted`: {'; '.join(sorted(wrong))}"
        return Diagnosis(JobPhase.STUCK, Reason.INVALID_SPEC, message)
    if refused:
        message = refusal_message(sorted(refused), rights_note or "")
        return Diagnosis(JobPhase.STUCK, Reason.TEMPLATE_NOT_ALLOWED, message)
    return None


def _rights_note(run: Run) -> str | None:
    """Why the rights of the user who wrote the job do not count. None: they do, as the site's
    admission policy has checked them at each write. Empty: this site has no such policy."""
    name = run.settings.tenancy.admission_policy
    if not name:
        return ""
    since = run.observed.policy_since
    if since is None:
        return f"The ValidatingAdmissionPolicy {name}, which checks users' rights, is not in force"
    created = parse_time(run.observed.document["metadata"].get("creationTimestamp"))
    if created is None or created < since + POLICY_SETTLE_TIME:
        return (
            f"The job is older than the ValidatingAdmissionPolicy {name}, which checks users'"
            " rights: delete the job and create it again"
        )
    return None


def invalid_manifest(error: Exception, observed: Observed, run_id: str) -> Diagnosis:
    messages = [str(error)]
    if any(WorkerJobView(job).run_id == run_id for job in observed.jobs):
        messages.insert(0, f"run {run_id} continues; this operator cannot read the manifest")
    return Diagnosis(JobPhase.STUCK, Reason.INVALID_SPEC, join_messages(messages))


def ignored_parts_note(unknown: list[Problem], run: Run) -> str:
    """Note on what this operator ignores: fields of a newer CRD, and unreadable revocations.
    Empty: nothing."""
    wrong = run.revocations_problem
    notes = [f"annotation {names.REVOKED_ANNOTATION}: {wrong}"] if wrong else []
    return join_messages([*_ignored_fields(unknown), *notes])


def _ignored_fields(unknown: list[Problem]) -> Iterator[str]:
    if not unknown:
        return
    paths = first_of([problem.path for problem in unknown], MAX_LISTED_FIELDS)
    yield (
        f"this operator does not know {paths} and ignores it; the CRD is newer:"
        " upgrade the operator"
    )
