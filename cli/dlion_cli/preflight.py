"""`dlion preflight`: whether the sites of a list will find, reach and believe each other."""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import click
from rich.table import Table
from rich.text import Text

from dlion_cli.checks import Check, Outcome, exit_code
from dlion_cli.cluster_options import context_names
from dlion_cli.figures import printable
from dlion_cli.finite import FiniteRange
from dlion_cli.get import output_console
from dlion_cli.manifests import STDIN, load_manifest, read_document
from dlion_cli.trust import OPERATORS_NAMESPACE, RUNS_OUT_SOON_DAYS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlion_api.spec import Job
    from dlion_cli.listed_sites import TrustedSite

_STYLES: Final = {
    Outcome.OK: "green",
    Outcome.WARN: "yellow",
    Outcome.FAIL: "bold red",
    Outcome.UNKNOWN: "dim",
}


@click.command()
@click.argument("file", metavar="FILE")
@click.option("-f", "--job", "manifest", metavar="JOB", help="Also check what this job asks for.")
@click.option(
    "--contexts", "--context", "contexts", metavar="A,B,…", callback=context_names,
    help="Also ask the clusters of these contexts.",
)  # fmt: skip
@click.option(
    "-n", "--namespace", metavar="NAME", default=OPERATORS_NAMESPACE, show_default=True,
    help="The operators' namespace.",
)  # fmt: skip
@click.option("--kubeconfig", metavar="FILE", help="Default: $KUBECONFIG or ~/.kube/config.")
@click.option(
    "--timeout", "timeout_s", type=FiniteRange(min=0, min_open=True, max=3600),
    metavar="SECONDS", default=10.0, show_default=True,
    help="Of each site that is dialled, and of each answer of a cluster.",
)  # fmt: skip
@click.option(
    "--bandwidth", is_flag=True,
    help="Also have the sites' operators measure their links to each other, for some seconds each. "
    "Needs --contexts.",
)  # fmt: skip
@click.option(
    "--least-bandwidth", "least_mbit", type=FiniteRange(min=0, min_open=True), metavar="MBIT",
    help="Fail where a link carries fewer Mbit/s in one direction (--bandwidth).",
)  # fmt: skip
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table")
def preflight(
    file: str,
    manifest: str | None,
    contexts: tuple[str, ...],
    namespace: str,
    kubeconfig: str | None,
    timeout_s: float,
    bandwidth: bool,
    least_mbit: float | None,
    output: str,
) -> int:
    """Check that the sites in FILE, the shared file of values, can be reached and believed.

    From this machine, without credentials of any cluster: each site's address is resolved and
    dialled, and the certificate that its operator presents is held against its bundle in FILE
    (`-` reads standard input). With --contexts the sites' clusters are asked, too: operator,
    definition, federation Service, whom it dials and believes, whom it hears, its clock; with -f
    also whether it has the gateway that the job needs, and its nodes have room; with --bandwidth
    what its links to the others carry. Each check says what was seen and what to do.

    Exit code 0; 69 where a check failed; 65 where FILE or JOB is wrong, with all that is (as
    `dlion trust verify`).

    \b
    dlion preflight sites.yaml
    dlion preflight sites.yaml -f job.yaml --contexts plant-a,plant-b,plant-c
    dlion preflight sites.yaml --contexts plant-a,plant-b --least-bandwidth 20
    dlion preflight sites.yaml -o json | jq '.checks[] | select(.outcome != "ok")'
    """
    if file == manifest == STDIN:
        raise click.UsageError("FILE and --job cannot both be standard input")
    if (bandwidth or least_mbit) and not contexts:
        raise click.UsageError("links are measured by the sites' operators: name their --contexts")
    sites = _listed(file)
    job = None if manifest is None else _job(manifest)
    from dlion_cli.site_dialling import dial_all

    checks = [_bundle(site) for site in sites]
    checks += [] if job is None else _named(job, sites)
    checks += dial_all(sites, timeout_s)
    if contexts:
        from dlion_cli.cluster_preflight import Bandwidth, cluster_checks, joined
        from dlion_cli.contexts import Contexts

        asked = Contexts(contexts, kubeconfig=kubeconfig, namespace=namespace)
        with contextlib.closing(asked):
            links = Bandwidth(least_mbit) if bandwidth or least_mbit else None
            checks = joined(checks, cluster_checks(asked, sites, job, timeout_s, links))
    _show(_in_order(checks, sites), output)
    return exit_code(checks)


def _listed(file: str) -> list[TrustedSite]:
    """The sites of the list. Raises: as `trust verify` does, but for bundles that end soon."""
    from dlion_cli.listed_sites import trusted_sites

    document, lines = read_document(file)
    return trusted_sites(
        document,
        source=_source(file),
        lines=lines,
        now=datetime.now(UTC),
        valid_for=timedelta(0),
    )


def _job(file: str) -> Job:
    document, lines = read_document(file)
    return load_manifest(document, source=_source(file), lines=lines)


def _source(file: str) -> str:
    return "standard input" if file == STDIN else file


def _bundle(site: TrustedSite) -> Check:
    """Whether there is time to bring a newer one to all sites."""
    left = site.bundle.ends - datetime.now(UTC)
    seen = f"holds until {site.bundle.ends:%Y-%m-%d}, sha256 {site.bundle.fingerprint[:29]}…"
    figures = {"valid_for_s": left.total_seconds()}
    if left > timedelta(days=RUNS_OUT_SOON_DAYS):
        return Check(site.name, "bundle", Outcome.OK, seen, figures=figures)
    advice = f"Bring its newest bundle to all sites: `dlion trust show` at {site.name}"
    return Check(site.name, "bundle", Outcome.WARN, seen, advice, figures)


def _named(job: Job, sites: Sequence[TrustedSite]) -> list[Check]:
    """Whether the list has each site that the job names."""
    listed = {site.name for site in sites}
    return [
        Check(site.name, "listed", Outcome.OK, f"job {job.metadata.name} names it")
        if site.name in listed
        else Check(
            site.name,
            "listed",
            Outcome.FAIL,
            f"job {job.metadata.name} names it, the list does not",
            "Add its entry to the list and upgrade every site, or take it out of spec.sites",
        )
        for site in job.spec.sites
    ]


def _in_order(checks: Sequence[Check], sites: Sequence[TrustedSite]) -> list[Check]:
    """Site by site, as the list has them; others after them."""
    place = {site.name: index for index, site in enumerate(sites)}
    return sorted(checks, key=lambda check: place.get(check.site, len(place)))


def _show(checks: Sequence[Check], output: str) -> None:
    if output == "json":
        document = {"outcome": _worst(checks), "checks": [check.as_json() for check in checks]}
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    for title in ("SITE", "CHECK", "RESULT"):
        table.add_column(title, no_wrap=True)
    table.add_column("SEEN", overflow="fold")
    before = ""
    for check in checks:
        seen = Text(printable(check.seen))
        if check.advice:
            seen.append(f"\n→ {printable(check.advice)}", style="bold")
        name = check.site if check.site != before else ""
        before = check.site
        result = Text(check.outcome, style=_STYLES[check.outcome])
        table.add_row(name, check.name, result, seen)
    output_console().print(table)


def _worst(checks: Sequence[Check]) -> str:
    """`fail`, `warn` or `ok`; what could not be looked at makes nothing worse."""
    found = {check.outcome for check in checks}
    return next((str(each) for each in (Outcome.FAIL, Outcome.WARN) if each in found), "ok")
