"""Generate docs/commands.md from the commands' own help; `--check` only compares.

Importing the commands imports no TensorFlow, so this takes a second.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import click
from generated_files import options, write_or_compare

from dlion_cli.command_line import SECTIONS, dlion

TARGET = Path(__file__).parent.parent / "docs" / "commands.md"
WIDTH = 100
COMMON = 2
"""An option that this many commands share with the same text is listed once."""
OF_ALL = {"--help", *(each.opts[-1] for each in dlion.params if isinstance(each, click.Option))}
"""Options of all commands, or of all for clusters, are not repeated in sections."""
DIFFERENCES = """Without a kubeconfig a pod's service account is
used; `--request-timeout` is the longest silence of the server (0: no limit)."""
Record = tuple[str, str]
HEAD = """<!-- Made by tools/generate_command_reference.py from the commands' help; do not edit. -->
# The commands

What `dlion COMMAND --help` prints; `kubectl dlion` is the same command. Commands for clusters also
take the options from `--namespace` to `--as-group`, before or after the command, except `trust
verify`; `preflight` with `--contexts` takes none that select one server. `dlion --version` prints
the version. See also [commands for clusters](cluster-commands.md) and
[exit codes](errors-and-exit-codes.md).

"""


def commands(command: click.Command, context: click.Context) -> Iterator[click.Context]:
    """Return each command below a group, and the group itself, in the order of its help."""
    yield context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if (child := command.get_command(context, name)) and not child.hidden:
                inner = click.Context(child, parent=context, info_name=name, terminal_width=WIDTH)
                yield from commands(child, inner)


def options_of(context: click.Context) -> list[tuple[click.Option, Record]]:
    """Return the options of one command, each with its two texts in the help."""
    shown = [one for one in context.command.get_params(context) if isinstance(one, click.Option)]
    records = ((one, one.get_help_record(context)) for one in shown)
    return [(one, record) for one, record in records if record]


def section(context: click.Context, common: Collection[Record]) -> str:
    """Return the help of one command; common options are only named, outer empty lines removed."""
    named = []
    for option, record in options_of(context):
        if record in common:
            option.hidden = True
            if OF_ALL.isdisjoint(option.opts):
                named.append(f"`{option.opts[-1]}`")
    text = context.command.get_help(context).strip()
    text = text.removeprefix("Usage: ").replace(" [OPTIONS]", "", 1)
    also = f"\nAlso {', '.join(named)}.\n" if named else ""
    return f"## `{context.command_path}`\n\n```text\n{text}\n```\n{also}"


def overview() -> str:
    """Return links to the commands, by section of the help."""
    links = {
        section: ", ".join(f"[{name}](#dlion-{name})" for name in names)
        for section, names in SECTIONS.items()
    }
    return "".join(f"- {section}: {names}\n" for section, names in links.items())


def most_common(found: Sequence[tuple[click.Option, Record]]) -> list[Record]:
    """Return the most frequent text of each option that several commands share."""
    counts = Counter(record for _, record in found)
    names = {record: option.opts[-1] for option, record in found}
    shared = sorted(counts, key=lambda one: -counts[one])
    chosen = {names[one]: one for one in reversed(shared) if counts[one] >= COMMON}
    return [record for record in counts if chosen.get(names[record]) == record]


def common_section(common: Collection[Record]) -> str:
    """Return the options that many commands have; those that kubectl has, too, only by name."""
    own = [one for one in common if not is_kubectls(one)]
    rows = "\n".join(f"- `{names}`: {text}" for names, text in own)
    same = ", ".join(f"`{names}`" for names, _ in common if is_kubectls((names, "")))
    return f"## Common options\n\n{rows}\n\nAs kubectl's: {same}. {DIFFERENCES}\n"


def is_kubectls(record: Record) -> bool:
    """Report whether this is an option of a connection."""
    return any(name.split(",")[0] in OF_ALL - {"--help"} for name in record[0].split())


def main() -> int:
    """Write or compare; return 1 if the file is out of date."""
    settings = dlion.context_settings
    root = click.Context(dlion, info_name="dlion", terminal_width=WIDTH, **settings)
    contexts = list(commands(dlion, root))
    common = most_common([found for one in contexts for found in options_of(one)])
    sections = [section(one, common) for one in contexts[1:]]
    page = HEAD + "\n".join([overview(), common_section(common), *sections])
    assert not {"tensorflow", "keras"} & sys.modules.keys(), "a command imports TensorFlow"
    return write_or_compare({TARGET: page}, check=options(__doc__).parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
