"""The certificates that verify a site's keeper, as a job's cluster or a file has them."""

import json
from pathlib import Path

from dlion_api import cluster_names as names
from dlion_api.errors import AbsentError, ContractError, DataError, DeniedError, UnavailableError
from dlion_api.names import JobKey, SiteName
from dlion_cli.cluster.client import api_path
from dlion_cli.cluster.cluster_jobs import JobClient
from dlion_cli.cluster.documents import mapping_of, mappings_in
from dlion_cli.inputs.bundles import read_bundle
from dlion_cli.views.job_status import JobStatus

_ADVICE = "Give its certificates with --trust FILE (`dlion trust show -o pem` prints them)"


def bundle_of_file(path: Path) -> bytes:
    """Raises: DataError if it is not a bundle of certificates; OSError."""
    try:
        return read_bundle(path.read_bytes()).pem.encode()
    except ContractError as error:
        raise DataError(f"{path}: {error}") from error


def bundle_in_cluster(
    jobs: JobClient, job: JobStatus, run: str, site: SiteName, *, own_site: SiteName
) -> bytes:
    """Return the certificates of the authority that signs for that site's keeper.

    `own_site`: the cluster's. Raises: UnavailableError without them; DataError if they are
    unusable; DeniedError.
    """
    mode = mapping_of(mapping_of(job.document.get("spec")).get("tls")).get("mode", "Managed")
    try:
        if mode == "Managed":
            text = _of_operator(jobs, job) if site == own_site else ""
        else:
            text = _of_job(jobs, job, run, site)
    except (AbsentError, DeniedError) as error:
        raise type(error)(f"{error}. {_ADVICE}") from error
    if not text:
        raise UnavailableError(f"the authority of site {site} is not known here. {_ADVICE}")
    try:
        return read_bundle(text).pem.encode()
    except ContractError as error:
        raise DataError(f"the authority of site {site}: {error}") from error


def _of_operator(jobs: JobClient, job: JobStatus) -> str:
    """The bundle from the newest run's ConfigMap: a site's operator signs for all its runs."""
    name = names.run_name(JobKey(job.namespace, job.name, job.run_id))
    document = jobs.cluster.get(jobs.cluster.core_path("configmaps", name))
    return str(mapping_of(document.get("data")).get(names.AUTHORITY_KEY, ""))


def _of_job(jobs: JobClient, job: JobStatus, run: str, site: SiteName) -> str:
    """The bundle from the annotations of the run's Jobs: the job names an authority at each
    site."""
    path = api_path("apis", "batch", "v1", "namespaces", jobs.cluster.namespace, "jobs")
    selector = f"{names.JOB_LABEL}={job.name},{names.RUN_LABEL}={run}"
    listed = jobs.cluster.get(path, {"labelSelector": selector})
    for each in mappings_in(listed.get("items")):
        annotations = mapping_of(mapping_of(each.get("metadata")).get("annotations"))
        try:
            bundles = mapping_of(json.loads(str(annotations.get(names.AUTHORITIES_ANNOTATION))))
        except (ValueError, RecursionError):
            continue
        if site in bundles:
            return str(bundles[site])
    return ""
