"""Checks a job, and plans its environment, before it is trained here or in virtual time.

Used by `dlion run`, `dlion simulate` and the Python client, so that each refuses the same jobs
before anything starts.
"""

import os
from pathlib import Path

from dlion_api.errors import Problem, SpecError
from dlion_api.spec import Job
from dlion_cli.inputs.downloads import fetch_downloads
from dlion_cli.inputs.manifests import reject_cluster_authority, reject_suspended
from dlion_cli.inputs.required_files import require_data, require_program
from dlion_environments.loading import load_environment
from dlion_environments.model import Environment
from dlion_environments.plan import Plan, unlimited_plan


def prepare_run(
    job: Job, environment: str | None, *, source: str, program_root: Path, data_root: Path
) -> tuple[Plan, Environment | None]:
    """The plan of a run on this machine, and its environment if one is named.

    `source` names the manifest in messages. Raises: SpecError if the job cannot run here, or the
    environment is invalid or does not fit; ProgramError or DataError if files are missing;
    UnavailableError or OSError if a download fails.
    """
    reject_suspended(job, source)
    reject_cluster_authority(job, source)
    plan, loaded = unlimited_plan(job.workers()), None
    if environment is not None:
        loaded = load_environment(environment)
        plan = loaded.plan(
            job.workers(),
            machine_cores=len(os.sched_getaffinity(0)),
            duration_s=job.spec.trainer.stop.max_seconds,
        )
    require_program(job, program_root)
    fetch_downloads(job)
    require_data([job], data_root)
    return plan, loaded


def prepare_simulation(job: Job, environment: str, *, source: str) -> tuple[Plan, Environment]:
    """The plan of a simulated run, and its environment.

    Raises: SpecError if the job cannot be simulated, or the environment is invalid or does not fit;
    DataError, UnavailableError or OSError if a download fails.
    """
    reject_suspended(job, source)
    check_can_simulate(job, source)
    loaded = load_environment(environment)
    plan = loaded.plan(
        job.workers(),
        machine_cores=None,
        duration_s=job.spec.trainer.stop.max_seconds,
        source=source,
    )
    loaded.check(job, source=source)
    fetch_downloads(job)
    return plan, loaded


def check_can_simulate(job: Job, source: str) -> None:
    """Raises: SpecError for jobs that cannot be simulated or that would never end."""
    stop = job.spec.trainer.stop
    problems = []
    if stop.max_seconds is None and stop.max_steps is None and stop.max_epochs is None:
        problems.append(
            Problem(
                "spec.trainer.stop",
                "a simulation needs a stop condition that is always reached",
                allowed="maxSeconds, maxSteps or maxEpochs",
                advice="For example, give --set trainer.stop.maxSeconds=600 (virtual seconds).",
            )
        )
    if job.spec.trainer.dataset.watch:
        problems.append(
            Problem(
                "spec.trainer.dataset.watch",
                "files do not change in virtual time",
                value="true",
                allowed="false",
                advice="Give --set trainer.dataset.watch=false",
            )
        )
    if problems:
        raise SpecError(problems, source=source)
