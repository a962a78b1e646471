"""kubectl's forms of options that click reads otherwise: `-n=NAME`, and options after `--`."""

import re
from collections.abc import Iterator, Sequence
from typing import Final

import click

_WITH_VALUE: Final = re.compile(r"(-[A-Za-z])=(.*)", re.DOTALL)


def joined_values(command: click.Command, arguments: Sequence[str]) -> list[str]:
    """The arguments with `-n=NAME` as `-nNAME`, up to `--`.

    Raises: UsageError for an option without a value, or a value of a flag.
    """
    options = {name: option for option in _options(command) for name in option.opts}
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [*(_joined(each, options) for each in arguments[:end]), *arguments[end:]]


def reject_late_options(arguments: Sequence[str]) -> None:
    """Raises: UsageError for an option after `--`; what stands there is a name."""
    names = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    if late := next((each for each in names if len(each) > 1 and each.startswith("-")), None):
        name = late.partition("=")[0] if late.startswith("--") else late[:2]  # without a token
        raise click.UsageError(
            f"{name} follows --, where only names are expected: put it before --"
        )


def _options(command: click.Command) -> Iterator[click.Option]:
    yield from (each for each in command.params if isinstance(each, click.Option))
    if isinstance(command, click.Group):
        for each in command.commands.values():
            yield from _options(each)


def _joined(argument: str, options: dict[str, click.Option]) -> str:
    match = _WITH_VALUE.fullmatch(argument)
    option = None if match is None else options.get(match[1])
    if match is None or option is None:
        return argument
    if option.is_flag:
        raise click.UsageError(f"{argument}: {match[1]} takes no value: write {match[1]}")
    if not match[2]:
        raise click.UsageError(f"{argument}: the value is missing")
    return f"{match[1]}{match[2]}"
