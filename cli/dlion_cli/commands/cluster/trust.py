"""`dlion trust`: print and verify the public certificates with which sites authenticate."""

import functools
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import click

from dlion_cli.cluster.cluster_jobs import JobClient
from dlion_cli.cluster.cluster_options import cluster_options, contexts_option
from dlion_cli.cluster.contexts import Contexts
from dlion_cli.inputs.bundles import Bundle
from dlion_cli.inputs.listed_sites import address_problem, read_sites
from dlion_cli.preflight_checks.site_authority import SiteAuthority, site_authority

OPERATOR_NAMESPACE: Final = "dlion-system"
MIN_VALID_DAYS: Final = 30
"""Time to distribute a new bundle to all sites."""


@click.group()
def trust() -> None:
    """Print and verify the public certificates with which sites authenticate each other.

    Each site has its own certificate authority. Its private key never leaves
    the site. `show` prints what other sites need; `verify` checks the values file that combines
    them.
    """


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
    help="Address at which other sites reach this one's operator.",
)  # fmt: skip
@click.option(
    "--authority", metavar="NAME", default="dlion-authority", show_default=True,
    help="The site's authority (the chart's authority.secretName).",
)  # fmt: skip
@click.option("-o", "--output", type=click.Choice(["yaml", "pem", "json"]), default="yaml")
@contexts_option(show_from_contexts)
@functools.partial(cluster_options, namespace=OPERATOR_NAMESPACE)
def show(jobs: JobClient, authority: str, address: str | None, output: str) -> None:
    """Print what other sites need to trust this one: its name, address and public certificates.

    Prints an entry of the chart's `sites`, with fingerprint and expiry; with --contexts, the whole
    list. If neither the federation Service nor the gateway has an address, a comment describes the
    address to fill in.

    \b
    dlion trust show --address plant-a.example:30446
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
    "--valid-for", type=click.IntRange(min=0), metavar="DAYS", default=MIN_VALID_DAYS,
    show_default=True, help="Reject bundles that expire sooner.",
)  # fmt: skip
def verify(file: str, valid_for: int) -> None:
    """Verify the list `sites` of the chart's values in FILE; `-` reads standard input.

    Checks names, addresses and bundles. A bundle contains valid certificates of its own site's
    authority, no private key, and nothing that another site has. Prints the fingerprints, to
    compare with those of `dlion trust show` at each site. The exit code is 65 if an entry is
    invalid, and 66 if the file cannot be read.
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
