"""`tools/testbed`: real Kubernetes sites on this machine, for tests and experiments."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

import cert_manager
import flux
import kueue
import route_kinds
import s3_gateway
from dlion_api.errors import DLionError
from gitops.argo_cd import APPLICATIONS
from gitops.judge import VERDICTS
from testbed import binaries, removal
from testbed.image_store import image_store
from testbed.project_images import Target, build_images
from testbed.requirements import missing
from testbed.sites import DEFAULT_NAME, Testbed, remove_orphans
from testbed.state import exclusive, folder_of, known_names

_OUTPUT = click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text")


@click.group(
    epilog="""\b
Examples:
  tools/testbed up --sites 2 --nodes 2
  tools/testbed run kubectl --site site-a get nodes
  tools/testbed rate site-a --up 20 --down 50
  tools/testbed cut site-a site-b; tools/testbed mend site-a site-b
  tools/testbed power site-a-n1 off
  tools/testbed down

Each site has an API server, controllers and nodes of its own, in network namespaces; pods
really run. Needs root. What else it needs, and how to get it: `tools/testbed check`."""
)
@click.option(
    "--name", default=DEFAULT_NAME, show_default=True, help="Name of the testbed; several can run."
)
@click.pass_context
def main(context: click.Context, name: str) -> None:
    """Create real Kubernetes sites on this machine, disturb them, remove them."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    context.obj = name


@main.command()
@click.option("--sites", default=1, show_default=True, help="Number of clusters; each is a site.")
@click.option(
    "--nodes", default=1, show_default=True, help="Nodes of each site; 0 for an API server alone."
)
@click.option(
    "--flat/--separate", default=True, show_default=True,
    help="Whether pods of different sites reach each other by their own addresses (else NodePort).",
)  # fmt: skip
@click.pass_obj
def up(name: str, sites: int, nodes: int, flat: bool) -> None:
    """Start sites; the first time this builds Kubernetes, which takes minutes."""
    made = Testbed.up(name=name, sites=sites, nodes=nodes, flat=flat, stays=True)
    for site in made.sites.values():
        click.echo(f"{site.name}  {site.layout.api_server}  export KUBECONFIG={site.kubeconfig}")


@main.command()
@click.pass_obj
def down(name: str) -> None:
    """Remove it: processes, mounts, namespaces, control groups, files. Also after a crash.

    Leftover testbeds of ended test sessions are removed as well.
    """
    with exclusive():
        removal.remove(name, folder_of(name))
        for orphan in remove_orphans():
            click.echo(f"also removed: {orphan}")


@main.command()
@_OUTPUT
@click.pass_obj
def status(name: str, output: str) -> None:
    """Print the state: sites, nodes, programs (with process ids), rates, cuts."""
    found = Testbed.load(name).status()
    click.echo(json.dumps(found, indent=1) if output == "json" else _as_text(found))


@main.command("list")
def list_all() -> None:
    """Names of all testbeds on this machine."""
    for name in known_names():
        click.echo(name)


@main.command("load-image")
@click.argument("archive", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--site", "sites", multiple=True, help="Only at this site; may be repeated.")
@click.pass_obj
def load_image(name: str, archive: Path, sites: tuple[str, ...]) -> None:
    """Import an image archive (docker save, buildah push ... docker-archive:) on every node."""
    Testbed.load(name).load_image(archive.resolve(), sites)


@main.command("build-images")
@click.option(
    "--target", "targets", multiple=True, type=click.Choice([target.value for target in Target]),
    help="Only this image; may be repeated.",
)  # fmt: skip
@click.option("--load", is_flag=True, help="Also import them on every node.")
@click.pass_obj
def build_project_images(name: str, targets: tuple[str, ...], load: bool) -> None:
    """Build the project's images from its present Dockerfile; print their names in pods.

    All three are also unpacked for the nodes of test sites.
    """
    images = build_images([Target(target) for target in targets] or list(Target))
    for image in images:
        megabytes = image.unpacked_bytes / 1e6
        click.echo(f"{image.reference}  {megabytes:.0f} MB  {image.archive}")
        if load:
            Testbed.load(name).load_image(image.archive)
    if not targets:
        image_store(images)  # here, as it can take longer than a test may


@main.command()
@click.argument("site")
@click.pass_obj
def kubeconfig(name: str, site: str) -> None:
    """Print the path of a site's kubeconfig."""
    click.echo(Testbed.load(name).site(site).kubeconfig)


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--site", default="site-a", show_default=True)
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def run(name: str, site: str, program: str, arguments: tuple[str, ...]) -> None:
    """Run kubectl, helm, ... of the testbed against a site: `run --site site-b helm list`."""
    found = Testbed.load(name)
    path = found.binaries.path(program)
    os.environ["KUBECONFIG"] = str(found.site(site).kubeconfig)
    os.execv(path, [program, *arguments])


@main.command()
@click.argument("site")
@click.option("--up", type=float, help="Mbit/s to all other sites; no limit by default.")
@click.option("--down", type=float, help="Mbit/s from all other sites.")
@click.pass_obj
def rate(name: str, site: str, up: float | None, down: float | None) -> None:
    """Shape what a site sends to and gets from the others."""
    Testbed.load(name).set_rate(site, up=up, down=down)


@main.command()
@click.argument("what")
@click.argument("other", required=False)
@click.pass_obj
def cut(name: str, what: str, other: str | None) -> None:
    """Cut a site off from another one, cut a site off from all, or unplug a node."""
    _set_cut(Testbed.load(name), what, other, cut_it=True)


@main.command()
@click.argument("what")
@click.argument("other", required=False)
@click.pass_obj
def mend(name: str, what: str, other: str | None) -> None:
    """Undo `cut`."""
    _set_cut(Testbed.load(name), what, other, cut_it=False)


@main.command()
@click.argument("what")
@click.argument("state", type=click.Choice(["on", "off"]))
@click.pass_obj
def power(name: str, what: str, state: str) -> None:
    """Turn the power of a node or a whole site off or on; disks keep their content."""
    found = Testbed.load(name)
    if what in found.sites:
        (found.start_site if state == "on" else found.kill_site)(what)
    else:
        (found.start_node if state == "on" else found.kill_node)(what)


@main.command()
@click.argument("site")
@click.option("--nodes", required=True, type=click.IntRange(1, 5000))
@click.pass_obj
def scale(name: str, site: str, nodes: int) -> None:
    """Add virtual nodes (KWOK), for scale: pods on them count as running."""
    Testbed.load(name).site(site).add_virtual_nodes(nodes)


@main.command()
def check() -> None:
    """List what this machine lacks for a testbed, and how to get it."""
    lacking = missing()
    click.echo("\n".join(lacking) or "nothing is missing")
    sys.exit(bool(lacking))


@main.command()
def build() -> None:
    """Build the programs into the cache if they are missing; print the folders."""
    click.echo(binaries.build().folder)
    click.echo(VERDICTS.build().parent)
    click.echo(cert_manager.build())
    click.echo(route_kinds.build())
    click.echo(kueue.definitions())
    click.echo(s3_gateway.build())


@main.command("build-flux")
def build_flux() -> None:
    """Build Flux' controllers into the cache if they are missing; print the folder."""
    click.echo(flux.build())


@main.command("build-kueue")
def build_kueue() -> None:
    """Build Kueue's manager into the cache if it is missing; print the folder."""
    click.echo(kueue.build())


@main.command("build-argo-cd")
def build_argo_cd() -> None:
    """Build the program that renders ApplicationSets into the cache if it is missing; print the
    folder."""
    click.echo(APPLICATIONS.build().parent)


def _set_cut(found: Testbed, what: str, other: str | None, *, cut_it: bool) -> None:
    if other is not None:
        (found.cut if cut_it else found.mend)(what, other)
    elif what in found.sites:
        (found.cut_site if cut_it else found.mend_site)(what)
    else:
        (found.cut_node if cut_it else found.mend_node)(what)


def _as_text(found: dict[str, Any]) -> str:
    lines = [f"testbed {found['name']}  {found['folder']}"]
    lines += [f"  cut: {' - '.join(pair)}" for pair in found["cuts"]]
    for site in found["sites"]:
        rates = [
            f"{way} {site[key]:g} Mbit/s"
            for way, key in (("up", "upMbitPerS"), ("down", "downMbitPerS"))
            if site[key] is not None
        ]
        lines.append("  ".join([f"  {site['name']}", site["apiServer"], *rates]))
        lines.append(f"    {_programs(site['programs'])}")
        for node in site["nodes"]:
            cable = "  cable out" if node["cut"] else ""
            lines.append(f"    {node['name']}  {node['address']}{cable}")
            lines.append(f"      {_programs(node['programs'])}")
    return "\n".join(lines)


def _programs(programs: dict[str, int | None]) -> str:
    return ", ".join(f"{name} {pid or 'ended'}" for name, pid in programs.items())


if __name__ == "__main__":
    try:
        main(prog_name="tools/testbed")
    except DLionError as error:
        sys.exit(f"testbed: {error}")
