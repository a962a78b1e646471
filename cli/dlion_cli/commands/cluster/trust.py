"""`dlion trust`: the public certificates of sites, and which workers a job no longer accepts."""

import functools
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import click

from dlion_api.cluster_names import REVOKED_ANNOTATION
from dlion_api.errors import DeniedError, Problem, SpecError
from dlion_api.exit_codes import ExitCode
from dlion_api.names import WorkerIdentity
from dlion_api.protocol.revocation import (
    MAX_REASON_CHARACTERS,
    MAX_REVOCATIONS,
    Revocation,
    clean_reason,
    parse_revocations,
    revocation_of,
    to_annotation,
)
from dlion_api.spec import load_job
from dlion_cli.cluster.cluster_jobs import Document, JobClient
from dlion_cli.cluster.cluster_options import cluster_options, contexts_option, name_argument
from dlion_cli.cluster.connection_flags import ConnectionGroup
from dlion_cli.cluster.contexts import Contexts
from dlion_cli.cluster.documents import mapping_of, mappings_in
from dlion_cli.inputs.bundles import Bundle
from dlion_cli.inputs.listed_sites import address_problem, read_sites
from dlion_cli.preflight_checks.site_authority import SiteAuthority, site_authority
from dlion_cli.views.job_status import JobStatus, text

OPERATOR_NAMESPACE: Final = "dlion-system"
MIN_VALID_DAYS: Final = 30
"""Time to distribute a new bundle to all sites."""
MAX_VALID_DAYS: Final = 36_500
"""A century: much later times are no dates."""
MAX_NAMED: Final = 20
ATTEMPTS: Final = 5
"""The operator writes to the same object, which refuses a change of an older version."""


@click.group(cls=ConnectionGroup)
def trust() -> None:
    """Decide which sites and workers are trusted."""


def show_from_contexts(contexts: Contexts, authority: str, address: str | None, output: str) -> int:
    """`show` for several sites: one list."""
    if address is not None or output == "pem":
        raise click.UsageError("--address and -o pem are for one site: remove --contexts")
    results = contexts.query(lambda jobs: site_authority(jobs.cluster, authority=authority))
    sites = list(results.values())
    if output == "json":
        click.echo(json.dumps([_as_json(site) for site in sites], indent=2))
    elif sites:
        click.echo(_as_yaml(sites))
    return contexts.report_errors()


def _checked_address(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> str | None:
    if value is not None and (fault := address_problem(value)):
        raise click.BadParameter(fault)
    return value


@trust.command(short_help="Print what other sites need to trust this one.")
@click.option(
    "--address", metavar="HOST:PORT", callback=_checked_address,
    help="Address of this site's operator for other sites.",
)  # fmt: skip
@click.option(
    "--authority", metavar="NAME", default="dlion-authority", show_default=True,
    help="The chart's authority.secretName.",
)  # fmt: skip
@click.option("-o", "--output", type=click.Choice(["yaml", "pem", "json"]), default="yaml")
@contexts_option(show_from_contexts)
@functools.partial(cluster_options, namespace=OPERATOR_NAMESPACE)
def show(jobs: JobClient, authority: str, address: str | None, output: str) -> None:
    """Print what other sites need to trust this one: its name, address and public certificates.

    It is an entry of the chart's `sites`; with --contexts the whole list.

    \b
    dlion trust show --contexts plant-a,plant-b,plant-c > sites.yaml
    dlion trust show -o pem | openssl x509 -noout -fingerprint -sha256
    """
    site = site_authority(jobs.cluster, authority=authority, address=address or "")
    if output == "pem":
        click.echo(site.bundle.pem, nl=False)
    elif output == "json":
        click.echo(json.dumps(_as_json(site), indent=2))
    else:
        click.echo(_as_yaml([site]))


@trust.command(short_help="Verify the list of sites in a values file.")
@click.argument("file", metavar="FILE")
@click.option(
    "--valid-for", type=click.IntRange(0, MAX_VALID_DAYS), metavar="DAYS", default=MIN_VALID_DAYS,
    show_default=True, help="Reject bundles that expire sooner.",
)  # fmt: skip
def verify(file: str, valid_for: int) -> None:
    """Verify the list `sites` of the chart's values in FILE, and print the fingerprints.

    `-` reads standard input. The exit code is 65 if an entry is invalid, and 66 if the file cannot
    be read.
    """
    for site in read_sites(file, valid_for=timedelta(days=valid_for)):
        click.echo(f"{site.name}  {site.address}\n  {_fingerprint_line(site.bundle)}")


def _fingerprint_line(bundle: Bundle) -> str:
    return f"until {bundle.not_after:%Y-%m-%d}, sha256 {bundle.fingerprint}"


def _as_yaml(sites: Sequence[SiteAuthority]) -> str:
    """A values file with these sites. Strings are quoted: a site may be named `on`."""
    lines = ["sites:"]
    for site in sites:
        hint = f"  # {site.hint}" if site.hint else ""
        lines += [
            f"  - name: {json.dumps(site.name)}",
            f"    address: {json.dumps(site.address)}{hint}",
            f"    # {_fingerprint_line(site.bundle)}",
            "    bundle: |",
            *(f"      {line}" for line in site.bundle.pem.splitlines()),
        ]
    return "\n".join(lines)


def _as_json(site: SiteAuthority) -> dict[str, Any]:
    return {
        "name": site.name,
        "address": site.address,
        "bundle": site.bundle.pem,
        "sha256": site.bundle.fingerprint,
        "notBefore": site.bundle.not_before.isoformat(),
        "notAfter": site.bundle.not_after.isoformat(),
    }


# ---- workers and sites of a job --------------------------------------------------------------


def revoke_in_contexts(contexts: Contexts, name: str, target: str, reason: str) -> int:
    """`revoke` at several sites."""
    results = contexts.query(lambda jobs: _revoke(jobs, name, target, reason))
    for context, (done, _) in results.items():
        click.echo(f"{context}  {done}")
    return contexts.report_errors()


_target_argument = click.argument("target", metavar="WORKER|SITE")


@trust.command(short_help="Shut a worker or a site out of a job.")
@name_argument()
@_target_argument
@click.option(
    "--reason", default="", metavar="TEXT",
    help="Why, for status and events.",
)  # fmt: skip
@contexts_option(revoke_in_contexts)
@cluster_options
def revoke(jobs: JobClient, name: str, target: str, reason: str) -> int:
    """Shut a worker, as SITE/GROUP-INDEX, or all workers of a SITE out of job NAME.

    It acts within ten seconds, in all runs of the job, until `dlion trust restore`. The site whose
    worker it is decides for all sites; elsewhere it acts at this site alone: give --contexts with
    all sites.

    \b
    dlion trust revoke cifar10 plant-b/large-0 --reason "stolen on Monday"
    dlion trust revoke cifar10 plant-c --contexts plant-a,plant-b
    """
    done, document = _revoke(jobs, name, target, reason)
    click.echo(done)
    if len(load_job(document).spec.sites) > 1:
        site = Revocation(target).site
        click.echo(
            f"dlion: it acts at all sites if this is {site}; else at this site alone (--contexts)",
            err=True,
        )
    return ExitCode.OK


def restore_in_contexts(contexts: Contexts, name: str, target: str) -> int:
    """`restore` at several sites."""
    results = contexts.query(lambda jobs: _restore(jobs, name, target))
    for context, done in results.items():
        click.echo(f"{context}  {done}")
    return contexts.report_errors()


@trust.command(short_help="Accept a revoked worker or site again.")
@name_argument()
@_target_argument
@contexts_option(restore_in_contexts)
@cluster_options
def restore(jobs: JobClient, name: str, target: str) -> int:
    """Lift a revocation of job NAME that was made at this site, or a quarantine.

    \b
    dlion trust restore cifar10 plant-b/large-0
    """
    click.echo(_restore(jobs, name, target))
    return ExitCode.OK


def _revoke(jobs: JobClient, name: str, target: str, reason: str) -> tuple[str, Document]:
    """Revoke the target. Returns what was done, and the stored job.

    Raises: SpecError if it names no worker, the run has ended, or no worker would be left.
    """
    if len(reason) > MAX_REASON_CHARACTERS:
        allowed = f"at most {MAX_REASON_CHARACTERS} characters"
        raise SpecError([Problem("--reason", "is too long", f"{len(reason)} characters", allowed)])
    revocation = Revocation(target, clean_reason(reason))

    def change(document: Document, known: tuple[Revocation, ...]) -> tuple[Revocation, ...]:
        if (outcome := JobStatus(document).outcome) is not None:
            problem = f"its run has ended ({outcome.type}): there is nothing to revoke"
            raise SpecError([Problem(name, problem)])
        workers = load_job(document).workers()
        _check_target(target, workers)
        now = (*(each for each in known if each.name != target), revocation)
        effective = [each for each in _revoked(document) if each.get("effective")]  # at all sites
        others = [Revocation(text(each.get("name"))) for each in effective]
        if all(revocation_of([*now, *others], worker) for worker in workers):
            advice = f"Use `dlion suspend {name}` or `dlion delete {name}`"
            raise SpecError([Problem(target, "no worker of the job would be left", advice=advice)])
        if len(now) > MAX_REVOCATIONS:
            allowed = f"{MAX_REVOCATIONS} names; revoke whole sites"
            raise SpecError([Problem(target, "too many are revoked", allowed=allowed)])
        return now

    document, changed = _change_revocations(jobs, name, change)
    done = f"{target} is revoked" if changed else f"{target} was revoked before; nothing changed"
    return f"{name}: {done}", document


def _restore(jobs: JobClient, name: str, target: str) -> str:
    """Accept the target again. Returns what was done.

    Raises: SpecError if the manifest has no such name and nothing of that name is revoked.
    """

    def change(document: Document, known: tuple[Revocation, ...]) -> tuple[Revocation, ...]:
        same = [each for each in known if each.name == target]
        if not same:
            _check_target(target, load_job(document).workers())
        others = tuple(each for each in known if each.name != target)
        is_quarantined = any(each.get("automatic") for each in _revoked_as(document, target))
        if is_quarantined or any(each.is_lifted for each in same):
            return (*others, Revocation(target, is_lifted=True))  # the operator must not repeat it
        return others

    document, changed = _change_revocations(jobs, name, change)
    if changed:
        return f"{name}: {target} is trusted again"
    # A quarantine lifted a moment ago may still be in the status.
    made = [each for each in _revoked_as(document, target) if not each.get("automatic")]
    by = sorted({text(each.get("by")) for each in made})
    where = f"; it is revoked at {', '.join(by)}: restore it there" if by else ""
    return f"{name}: {target} is not revoked here; nothing changed{where}"


def _revoked(document: Document) -> list[Document]:
    """The revocations and quarantines as the status has them, of all sites."""
    return mappings_in(mapping_of(document.get("status")).get("revoked"))


def _revoked_as(document: Document, target: str) -> list[Document]:
    return [each for each in _revoked(document) if each.get("name") == target]


def _check_target(target: str, workers: Sequence[WorkerIdentity]) -> None:
    sites = sorted({worker.site for worker in workers})
    names = [worker.name for worker in workers]
    if target in sites or target in names:
        return
    shown = ", ".join([*sites, *names[:MAX_NAMED], *(["…"] if len(names) > MAX_NAMED else [])])
    problem = Problem("WORKER|SITE", "the manifest has no such name", repr(target)[:80], shown)
    raise SpecError([problem])


def _change_revocations(
    jobs: JobClient,
    name: str,
    change: Callable[[Document, tuple[Revocation, ...]], tuple[Revocation, ...]],
) -> tuple[Document, bool]:
    """Change the job's revocations. Returns the stored job, and whether it has changed.

    Raises: SpecError if those that are stored cannot be read; DeniedError if other clients change
    the job all the time.
    """
    for attempt in range(1, ATTEMPTS + 1):
        document = jobs.get(name)
        metadata = mapping_of(document.get("metadata"))
        annotations = mapping_of(metadata.get("annotations"))
        before, problem = parse_revocations(str(annotations.get(REVOKED_ANNOTATION) or ""))
        if problem:
            path = f"metadata.annotations[{REVOKED_ANNOTATION}]"
            advice = f"Correct it: kubectl edit dlionjob {name}"
            raise SpecError([Problem(path, problem, advice=advice)])
        after = change(document, before)
        if set(after) == set(before):
            return document, False
        value = to_annotation(after) if after else None
        version = str(metadata.get("resourceVersion") or "")
        try:
            return jobs.annotate(name, {REVOKED_ANNOTATION: value}, version=version), True
        except DeniedError:
            if attempt == ATTEMPTS:
                raise
    raise AssertionError("the loop returns or raises")
