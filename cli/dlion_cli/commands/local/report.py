"""`dlion report`: one self-contained HTML page of one result folder, or of several."""

import os
from pathlib import Path

import click


@click.command()
@click.argument("folders", nargs=-1, required=True, metavar="DIR…", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path),
    help="The page. Default: DIR/report.html, or ./report.html for several folders.",
)  # fmt: skip
@click.option(
    "--label", "labels", multiple=True, metavar="TEXT",
    help="Name of a run, once per DIR in the same order. Default: the folder's name.",
)  # fmt: skip
@click.option(
    "--reference", metavar="LABEL",
    help="Single-worker run to which speed-up refers. Default: the first one.",
)  # fmt: skip
@click.option("--title", default="", metavar="TEXT", help="Title of the page.")
@click.option(
    "--picture", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.svg",
    help="Also write the first charts as one SVG.",
)  # fmt: skip
def report(
    folders: tuple[Path, ...],
    out: Path | None,
    labels: tuple[str, ...],
    reference: str | None,
    title: str,
    picture: Path | None,
) -> None:
    """Create an HTML report of one result folder, or compare several, as one page."""
    if labels and len(labels) != len(folders):
        raise click.UsageError(
            f"--label was given {len(labels)} times for {len(folders)} folders; "
            "give one for each folder, or none"
        )
    if picture is not None and picture.suffix.lower() != ".svg":
        raise click.UsageError(f"--picture {picture}: must be an SVG file. Name it FILE.svg")
    from dlion_results.report.page import write_report

    target = out or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    page = write_report(folders, target, labels=labels, title=title, reference=reference)
    click.echo(os.fsencode(page))  # a name may be no text
    if picture is not None:
        from dlion_results.report.picture import write_picture  # matplotlib

        click.echo(os.fsencode(write_picture(folders, picture, labels=labels, title=title)))
