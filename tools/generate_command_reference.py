"""Generates docs/commands.md from the commands' own help; `--check` only compares.

Importing the commands imports no TensorFlow, so this takes a second.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click
from generated_files import options, write_or_compare

from dlion_cli.command_line import dlion

TARGET = Path(__file__).parent.parent / "docs" / "commands.md"
WIDTH = 100
HEAD = """<!-- Made by tools/generate_command_reference.py from the commands' help; do not edit. -->
# The commands

What `dlion COMMAND --help` prints. `kubectl dlion` is the same command. See also [commands for jobs
on a cluster](cluster-commands.md) and [exit codes](errors-and-exit-codes.md).

"""


def commands(command: click.Command, context: click.Context) -> Iterator[click.Context]:
    """Each command below a group, and the group itself, in the order of its help."""
    yield context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if (child := command.get_command(context, name)) and not child.hidden:
                inner = click.Context(child, parent=context, info_name=name, terminal_width=WIDTH)
                yield from commands(child, inner)


def section(context: click.Context) -> str:
    """The help of one command; the empty lines at its ends are left out."""
    text = context.command.get_help(context).strip()
    return f"## `{context.command_path}`\n\n```text\n{text}\n```\n"


def main() -> int:
    """Write or compare; return 1 if the file is out of date."""
    settings = dlion.context_settings
    root = click.Context(dlion, info_name="dlion", terminal_width=WIDTH, **settings)
    page = HEAD + "\n".join(section(context) for context in commands(dlion, root))
    assert not {"tensorflow", "keras"} & sys.modules.keys(), "a command imports TensorFlow"
    return write_or_compare({TARGET: page}, check=options(__doc__).parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
