"""`dlion report`: one self-contained page of one result folder, or of several side by side."""

from __future__ import annotations

from pathlib import Path

import click

from dlion_api.exit_codes import ExitCode


@click.command()
@click.argument("folders", nargs=-1, required=True, metavar="DIR…", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where the page goes; by default DIR/report.html, or report.html here for several.",
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="TEXT",
    help="Name of a run on the page, once per DIR in the same order; by default the folder's name, "
    "with as much of its path as tells the runs apart.",
)
@click.option(
    "--reference",
    metavar="LABEL",
    help="The run of one worker that speed-up is told against; by default the first there is.",
)
@click.option("--title", default="", metavar="TEXT", help="Title of the page.")
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.svg",
    help="Also write the first charts as one SVG, for a README or a slide.",
)
def report(
    folders: tuple[Path, ...],
    out: Path | None,
    labels: tuple[str, ...],
    reference: str | None,
    title: str,
    picture: Path | None,
) -> int:
    """Make report.html of a result folder, or compare several.

    The page holds its pictures itself: it can be mailed and opened anywhere. Among several runs
    one with a single worker is the reference for speed-up (--reference); the page names it.
    """
    if labels and len(labels) != len(folders):
        raise click.UsageError(
            f"--label was given {len(labels)} times for {len(folders)} folders; "
            "give one for each folder, or none"
        )
    if picture is not None and picture.suffix.lower() != ".svg":
        raise click.UsageError(f"--picture {picture}: is drawn as SVG. Name it FILE.svg")
    from dlion_worker.results.report.page import write_report
    from dlion_worker.results.report.picture import write_picture

    target = out or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    page = write_report(folders, target, labels=labels, title=title, reference=reference)
    click.echo(page)
    if picture is not None:
        click.echo(write_picture(folders, picture, labels=labels, title=title))
    return ExitCode.OK
