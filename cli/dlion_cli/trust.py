"""`dlion trust`: the public certificates by which sites believe each other, shown and checked."""

from __future__ import annotations

import functools
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import click

from dlion_cli.cluster_options import cluster_options, contexts_option
from dlion_cli.manifests import STDIN, read_document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlion_cli.bundles import Bundle
    from dlion_cli.cluster_jobs import Jobs
    from dlion_cli.contexts import Contexts
    from dlion_cli.site_authority import SiteAuthority

OPERATORS_NAMESPACE: Final = "dlion-system"
RUNS_OUT_SOON_DAYS: Final = 30
"""In which a bundle is to be brought to all sites."""


@click.group()
def trust() -> None:
    """Exchange the public certificates by which sites believe each other.

    Each site has an authority of its own, whose key never leaves it. `show` prints what the others
    need; `verify` checks the shared file of values in which it is put together.
    """


def joined_show(contexts: Contexts, authority: str, address: str | None, output: str) -> int:
    """`show` of several sites: one list."""
    from dlion_cli.site_authority import site_authority

    if address is not None or output == "pem":
        raise click.UsageError("--address and -o pem are of one site: leave --contexts away")
    found = contexts.ask(lambda jobs: site_authority(jobs.cluster, authority=authority))
    sites = list(found.values())
    if output == "json":
        click.echo(json.dumps([_as_json(site) for site in sites], indent=2))
    elif sites:
        click.echo(_as_yaml(sites))
    return contexts.end()


def _checked_address(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> str | None:
    from dlion_cli.listed_sites import address_fault

    if value is not None and (fault := address_fault(value)):
        raise click.BadParameter(fault)
    return value


@trust.command(short_help="Print what other sites need of this one.")
@click.option(
    "--address", metavar="HOST:PORT", callback=_checked_address,
    help="Where the other sites reach this one's operator.",
)  # fmt: skip
@click.option(
    "--authority", metavar="NAME", default="dlion-authority", show_default=True,
    help="The site's authority (the chart's authority.secretName).",
)  # fmt: skip
@click.option("-o", "--output", type=click.Choice(["yaml", "pem", "json"]), default="yaml")
@contexts_option(joined_show)
@functools.partial(cluster_options, namespace=OPERATORS_NAMESPACE)
def show(jobs: Jobs, authority: str, address: str | None, output: str) -> int:
    """Print what other sites need of this one: its name, address and public certificates.

    As an entry of the chart's `sites`, with fingerprint and end; with --contexts the whole list.
    Where neither the federation Service nor the site's gateway tells the address, a comment says
    what it has to be.

    \b
    dlion trust show --address plant-a.example:30446
    dlion trust show --contexts plant-a,plant-b,plant-c > sites.yaml
    dlion trust show -o pem | openssl x509 -noout -fingerprint -sha256
    """
    from dlion_cli.site_authority import site_authority

    site = site_authority(jobs.cluster, authority=authority, address=address or "")
    if output == "pem":
        click.echo(site.bundle.pem, nl=False)
    elif output == "json":
        click.echo(json.dumps(_as_json(site), indent=2))
    else:
        click.echo(_as_yaml([site]))
    return 0


@trust.command(short_help="Check the list of sites in a file of values.")
@click.argument("file", metavar="FILE")
@click.option(
    "--valid-for", type=click.IntRange(min=0), metavar="DAYS", default=RUNS_OUT_SOON_DAYS,
    show_default=True, help="Refuse a bundle that runs out sooner.",
)  # fmt: skip
def verify(file: str, valid_for: int) -> int:
    """Check the list `sites` of the chart's values in FILE; `-` reads standard input.

    Names, addresses, and bundles: certificates of an authority, of the site that is named, that
    hold, no private keys, no two sites with the same. Prints the fingerprints, to be compared with
    those that `dlion trust show` prints at each site. Exit code 65 with all that is wrong, 66 when
    the file cannot be read.
    """
    from dlion_cli.listed_sites import trusted_sites

    document, lines = read_document(file)
    sites = trusted_sites(
        document,
        source="standard input" if file == STDIN else file,
        lines=lines,
        now=datetime.now(UTC),
        valid_for=timedelta(days=valid_for),
    )
    for site in sites:
        click.echo(f"{site.name}  {site.address}\n  {_fingerprint_line(site.bundle)}")
    return 0


def _fingerprint_line(bundle: Bundle) -> str:
    return f"until {bundle.ends:%Y-%m-%d}, sha256 {bundle.fingerprint}"


def _as_yaml(sites: Sequence[SiteAuthority]) -> str:
    """A file of values: the list of these sites. Texts are quoted: a site may be called `on`."""
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
        "notBefore": site.bundle.begins.isoformat(),
        "notAfter": site.bundle.ends.isoformat(),
    }
