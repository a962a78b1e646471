"""`dlion preflight`: check whether the listed sites can reach and authenticate each other."""

import contextlib
import functools
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click
from rich.text import Text

from dlion_api.exit_codes import ExitCode
from dlion_api.spec import Job
from dlion_cli.cluster.cluster_options import context_names
from dlion_cli.cluster.connection_flags import (
    ONE_SERVER,
    complete_contexts,
    connection_flags,
    given_options,
    pop_settings,
)
from dlion_cli.cluster.contexts import Contexts
from dlion_cli.commands.cluster.get import output_console
from dlion_cli.commands.cluster.trust import MIN_VALID_DAYS, OPERATOR_NAMESPACE
from dlion_cli.inputs.listed_sites import TrustedSite, read_sites
from dlion_cli.inputs.manifests import STDIN, read_job, source_of
from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from dlion_cli.terminal import options
from dlion_cli.terminal.formatting import printable
from dlion_cli.terminal.plain_table import plain_table

_STYLES: Final = {
    CheckOutcome.OK: "green",
    CheckOutcome.WARN: "yellow",
    CheckOutcome.FAIL: "bold red",
    CheckOutcome.UNKNOWN: "dim",
}


@click.command()
@click.argument("file", metavar="FILE")
@click.option(
    "-f",
    "--job",
    "manifest",
    metavar="JOB",
    help="Also check gateway, capacity and DLionRuntime for this job.",
)
@click.option(
    "--contexts", "--context", "contexts", metavar="A,B,…", callback=context_names,
    shell_complete=complete_contexts,
    help="Also query the clusters of these contexts.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", type=options.FiniteFloatRange(min=0, min_open=True, max=3600),
    metavar="SECONDS", default=10.0, show_default=True,
    help="Limit for each connection and response.",
)  # fmt: skip
@click.option(
    "--bandwidth", is_flag=True,
    help="Also let operators measure their links, some seconds each. Needs "
    "--contexts.",
)  # fmt: skip
@click.option(
    "--min-bandwidth", "min_mbit", type=options.FiniteFloatRange(min=0, min_open=True),
    metavar="MBIT", help="Fail if a link is slower (implies --bandwidth).",
)  # fmt: skip
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table")
@functools.partial(
    connection_flags, namespace=OPERATOR_NAMESPACE, of_namespace="The operators' namespace",
    without={"context", *ONE_SERVER},
)  # fmt: skip
def preflight(
    file: str,
    manifest: str | None,
    contexts: tuple[str, ...],
    timeout_s: float,
    bandwidth: bool,
    min_mbit: float | None,
    output: str,
    **given: Any,
) -> int:
    """Check that the sites in FILE, the shared values file, can be reached and authenticated.

    It connects to each site from this machine, without cluster credentials, and verifies the
    operator's certificate (`-` reads standard input). Each check prints what it observed and what
    to do. The exit code is 69 if a check failed, and 65 if FILE or JOB is invalid.

    \b
    dlion preflight sites.yaml -f job.yaml --contexts plant-a,plant-b,plant-c
    dlion preflight sites.yaml -o json | jq '.checks[] | select(.outcome != "ok")'
    """
    if file == manifest == STDIN:
        raise click.UsageError("FILE and --job cannot both be standard input")
    if (bandwidth or min_mbit) and not contexts:
        raise click.UsageError("the sites' operators measure links: give --contexts")
    if not contexts and (unused := given_options(click.get_current_context())):
        raise click.UsageError(f"{unused[0]} is of the sites' clusters: give --contexts")
    connection = pop_settings(given)
    sites = read_sites(file, valid_for=timedelta(0))
    job = None if manifest is None else read_job(manifest, source=source_of(manifest))
    from dlion_cli.preflight_checks.site_probe import probe_sites

    checks = [_bundle(site) for site in sites]
    checks += [] if job is None else _named(job, sites)
    checks += probe_sites(sites, timeout_s)
    if contexts:
        from dlion_cli.preflight_checks.preflight_clusters import cluster_checks, merge_checks

        clusters = Contexts(contexts, connection)
        with contextlib.closing(clusters):
            if bandwidth and min_mbit is None:
                min_mbit = 0.0  # any rate is sufficient
            checks = merge_checks(checks, cluster_checks(clusters, sites, job, timeout_s, min_mbit))
    place = {site.name: index for index, site in enumerate(sites)}  # others come last
    _show(sorted(checks, key=lambda check: place.get(check.site, len(place))), output)
    failed = any(check.outcome is CheckOutcome.FAIL for check in checks)  # warnings do not count
    return ExitCode.UNAVAILABLE if failed else ExitCode.OK


def _bundle(site: TrustedSite) -> Check:
    """Whether there is time to distribute a newer bundle."""
    left = site.bundle.not_after - datetime.now(UTC)
    observed = (
        f"valid until {site.bundle.not_after:%Y-%m-%d}, sha256 {site.bundle.fingerprint[:29]}…"
    )
    figures = {"valid_for_s": left.total_seconds()}
    if left > timedelta(days=MIN_VALID_DAYS):
        return Check(site.name, "bundle", CheckOutcome.OK, observed, figures=figures)
    advice = f"Distribute its newest bundle to all sites: `dlion trust show` at {site.name}"
    return Check(site.name, "bundle", CheckOutcome.WARN, observed, advice, figures)


def _named(job: Job, sites: Sequence[TrustedSite]) -> list[Check]:
    """Whether the list has each site of the job."""
    listed = {site.name for site in sites}
    return [
        Check(site.name, "listed", CheckOutcome.OK, f"job {job.metadata.name} names it")
        if site.name in listed
        else Check(
            site.name,
            "listed",
            CheckOutcome.FAIL,
            f"job {job.metadata.name} names it, the list does not",
            "Add its entry to the list and upgrade every site, or remove it from spec.sites",
        )
        for site in job.spec.sites
    ]


def _show(checks: Sequence[Check], output: str) -> None:
    outcomes = {check.outcome for check in checks}
    if output == "json":
        worst = [each for each in (CheckOutcome.FAIL, CheckOutcome.WARN) if each in outcomes]
        outcome = str(worst[0]) if worst else "ok"  # unknown outcomes do not count
        document = {"outcome": outcome, "checks": [check.as_json() for check in checks]}
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    table = plain_table("SITE", "CHECK", "RESULT", folded="OBSERVED")
    before = ""
    for check in checks:
        observed = Text(printable(check.observed))
        if check.advice:
            observed.append(f"\n→ {printable(check.advice)}", style="bold")
        name = Text(printable(check.site) if check.site != before else "")  # may have brackets
        before = check.site
        result = Text(check.outcome, style=_STYLES[check.outcome])
        table.add_row(name, check.name, result, observed)
    output_console().print(table)
