"""`dlion describe` of a result folder."""

import json
from pathlib import Path

import click
from rich.console import Console, RenderableType
from rich.text import Text

from dlion_cli.findings.folder_problems import RunFacts, read_run_facts
from dlion_cli.findings.problem_table import problem_parts
from dlion_cli.terminal.formatting import format_way, printable
from dlion_cli.terminal.table import summary_parts
from dlion_cli.views.event_table import kept_events_table

MAX_EVENTS = 20


def describe_folder(path: Path, console: Console, output: str) -> None:
    """Print what the folder has; with `output="json"` as one JSON object.

    Raises: DataError if it has no run.
    """
    facts = read_run_facts(path)
    if output == "json":
        click.echo(json.dumps(facts.as_json(), indent=2))  # ASCII: a name may be no Unicode text
        return
    for part in _parts(facts, console.width):
        console.print(part, soft_wrap=isinstance(part, Text))


def _parts(facts: RunFacts, width: int) -> list[RenderableType]:
    parts = problem_parts(facts.problems, facts.notes)
    if facts.remaining is not None:
        is_virtual = facts.run.command == "simulate"
        way = format_way(facts.remaining, is_virtual=is_virtual)
        parts += [Text(way, style="bold"), Text("")]
    if facts.summary:
        parts += [*summary_parts(facts.summary, width), Text("")]
    if events := facts.events:
        hidden = len(events) - MAX_EVENTS
        more = f" ({hidden:,} earlier: `dlion report` shows more)" if hidden > 0 else ""
        parts.append(Text(f"EVENTS{more}", style="bold"))
        shown = [
            {**event, "message": printable(event["message"]), "reason": printable(event["reason"])}
            for event in events[-MAX_EVENTS:]
        ]
        parts += [kept_events_table(shown), Text("")]
    if commands := facts.next_commands:
        parts += [Text("NEXT", style="bold"), *(Text(command) for command in commands)]
    return parts
