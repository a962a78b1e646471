"""Warns of entries of an environment that a run does not reach."""

import click

from dlion_environments.model import Environment

MAX_NAMED = 8


def warn_unreached(environment: Environment, seconds: float | None) -> None:
    """Print the environment entries that start after the run's end."""
    if paths := environment.unreached(seconds):
        more = f" and {len(paths) - MAX_NAMED} more" if len(paths) > MAX_NAMED else ""
        click.echo(
            f"dlion: environment {environment.name}: the run ends at {seconds:g} s "
            f"(stop.maxSeconds), before {', '.join(paths[:MAX_NAMED])}{more}",
            err=True,
        )
