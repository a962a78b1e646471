"""`dlion init`: create a manifest and a program to start from."""

import shlex
from importlib import resources
from pathlib import Path

import click

from dlion_results.run_folder.storage import StorageError

TEMPLATES = {"image": ("job.yaml", "program.py"), "digits": ("job.yaml",)}


@click.command()
@click.argument("directory", default=".", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--template", type=click.Choice(sorted(TEMPLATES)), default="image", show_default=True,
    help="image: your own model and data, in program.py. digits: a built-in program.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Overwrite existing files.")
def init(directory: Path, template: str, force: bool) -> None:
    """Create job.yaml in DIRECTORY, and program.py for a model of your own."""
    names = TEMPLATES[template]
    source = resources.files("dlion_cli") / "templates" / template
    try:
        existing = [name for name in names if (directory / name).exists()]
        if existing and not force:
            raise click.UsageError(
                f"{', '.join(existing)}: already in {directory}; name another directory, or use"
                " --force to overwrite"
            )
        directory.mkdir(parents=True, exist_ok=True)
        for name in names:
            text = (source / f"{name}.tmpl").read_text(encoding="utf-8")
            (directory / name).write_text(text, encoding="utf-8")
            click.echo(f"wrote {directory / name}")
    except OSError as error:
        raise StorageError(
            f"{directory}: the template cannot be written: {error.strerror}. Name a folder that "
            "you may write to, on a disk with free space"
        ) from error
    manifest = shlex.quote(str(directory / "job.yaml"))
    click.echo(f"next: dlion validate {manifest}")
    click.echo(f"      dlion run {manifest}")
