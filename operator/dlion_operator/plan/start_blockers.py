"""Why a run without Jobs does not start for now. Pure."""

from dlion_operator.plan.outcome.diagnosis import missing_authority
from dlion_operator.plan.outcome.job_phases import Diagnosis, JobPhase
from dlion_operator.plan.runs import Run
from dlion_operator.plan.runtime_limits import BLOCKING, runtime_blocker


def start_blocker(run: Run, refusal: Diagnosis | None) -> Diagnosis | None:
    """Return why a run without Jobs gets none for now, or None. No such reason is final. `refusal`:
    why no pod of its manifest can be made here."""
    if diagnosis := runtime_blocker(run):
        return diagnosis
    if refusal:
        return refusal
    if diagnosis := missing_authority(run):
        return diagnosis
    if (rejected := run.observed.rejected) is not None:
        return Diagnosis(JobPhase.STUCK, rejected.reason, rejected.message)
    return None


def is_without_objects(diagnosis: Diagnosis, refusal: Diagnosis | None) -> bool:
    """Whether not even the other objects of that run can be made: its keeper needs the same
    image."""
    return refusal is not None or diagnosis.reason in BLOCKING
