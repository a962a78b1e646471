"""The commands of `dlion`. Each one's module is imported only when it is used.

So `dlion --help`, `validate`, `explain` and `init` need neither TensorFlow nor gRPC. `run` runs a
command in this process; the process of a command is `__main__`.
"""

import difflib
import functools
import importlib
import os
import re
import select
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from dlion_api.errors import ProgramError
from dlion_cli.cluster.connection_flags import connection_flags, given_settings
from dlion_cli.terminal.failures import exit_code_of, message_of
from dlion_cli.terminal.formatting import printable_lines
from dlion_cli.terminal.interruption import (
    exit_on_later_signals,
    raise_on_signals,
    take_interrupt,
)
from dlion_worker.program_traceback import program_traceback

_WITH_VALUE: Final = re.compile(r"(-[A-Za-z])=(.*)", re.DOTALL)
SECTIONS: Final = {  # by section: module below dlion_cli.commands, function, summary
    "Run here": {
        "run": ("local.run:run", "Train a job on this machine."),
        "simulate": ("local.simulate:simulate", "Train a job in virtual time."),
        "compare": ("local.compare:compare", "Compare policies in simulated runs."),
        "replay": ("local.replay:replay", "Simulate a recorded run again, with other settings."),
        "ls": ("local.ls:list_results", "List result folders."),
        "calibrate": ("local.calibrate:calibrate", "Measure the cost of a step on this machine."),
        "report": ("local.report:report", "Create an HTML report of result folders."),
    },
    "Clusters": {
        "submit": ("cluster.submit:submit", "Submit jobs to a cluster."),
        "get": ("cluster.get:get", "Display the jobs of a cluster."),
        "describe": ("cluster.describe:describe", "Show what is wrong with a job, and all of it."),
        "watch": ("cluster.watch:watch", "Watch a job of a cluster until it ends."),
        "wait": ("cluster.wait:wait", "Wait for a condition, the end or deletion of jobs."),
        "logs": ("cluster.logs:logs", "Print the logs of a job's workers."),
        "events": ("cluster.events:events", "List events of a job and its pods."),
        "top": ("cluster.top:top", "Show the load of a job's workers and links."),
        "fetch": ("cluster.fetch:fetch", "Download a job's model or results."),
        "scale": ("cluster.scale:scale", "Change the number of workers of a group."),
        "suspend": ("cluster.suspend_resume:suspend", "Stop a job's workers and keep the job."),
        "resume": ("cluster.suspend_resume:resume", "Restart the workers of a suspended job."),
        "delete": ("cluster.delete:delete", "Delete jobs from a cluster."),
        "trust": ("cluster.trust:trust", "Print and verify sites' public certificates."),
        "preflight": ("cluster.preflight:preflight", "Check several sites before a run."),
        "doctor": ("cluster.doctor:doctor", "Check this machine and the cluster for faults."),
    },
    "Manifests and shell": {
        "init": ("local.init:init", "Create a manifest and a program template."),
        "validate": ("local.validate:validate", "Validate manifests and environments."),
        "explain": ("local.explain:explain", "Describe the fields of the manifest."),
        "render": ("local.render:render", "Print the objects an operator makes of a job."),
        "completion": ("local.completion:completion", "Print a script for shell completion."),
    },
}
COMMANDS: Final = {
    name: command for section in SECTIONS.values() for name, command in section.items()
}


def is_for_clusters(command: str | None) -> bool:
    return command in COMMANDS and COMMANDS[command][0].startswith("cluster.")


class LazyGroup(click.Group):
    """A group that imports a subcommand's module only to run it or to print its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002 - click's signature
        cmd_name: str,
    ) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name != "run":  # logs of its workers keep TensorFlow's errors
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(f"dlion_cli.commands.{module}"), name)
        assert isinstance(command, click.Command), cmd_name
        raise_on_signals()  # the imports that take long are over
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands or options with this prefix. Unlike click's, it imports no command."""
        commands = [
            CompletionItem(name, help=summary)
            for name, (_, summary) in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002 - click's signature
        formatter: click.HelpFormatter,
    ) -> None:
        width = max(map(len, COMMANDS))
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                # Padded, so that the summaries of all sections stand below each other.
                formatter.write_dl([(n.ljust(width), text) for n, (_, text) in commands.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raises: UsageError."""
        before = next((i for i, each in enumerate(args) if each in COMMANDS), len(args))
        return super().parse_args(ctx, [*_joined_values(self, args[:before]), *args[before:]])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command. Raises: UsageError that names a similar command."""
        given = args[0]
        if given not in COMMANDS and not given.startswith("-") and not ctx.resilient_parsing:
            close = difflib.get_close_matches(given.lower(), COMMANDS, 1)
            hint = f'did you mean "{close[0]}"?' if close else "dlion --help lists all"
            ctx.fail(f'no such command "{given}"; {hint}')
        name, command, others = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            if is_for_clusters(name):
                _reject_late_options(others)
            others = _joined_values(command, others)
        return name, command, others


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dlion", prog_name="dlion")
@functools.partial(connection_flags, hidden=True)
@click.pass_context
def dlion(ctx: click.Context, /, **cluster: Any) -> None:
    """Train deep models decentrally, across micro-clouds at the edge."""
    name = ctx.invoked_subcommand or ""
    if given := given_settings(cluster):
        ctx.default_map = {name: _command_defaults(ctx, name, given)}


def _command_defaults(
    ctx: click.Context, name: str, given: Mapping[str, object]
) -> dict[str, object]:
    """The options before the command as its defaults: kubectl takes them before and after it.

    Raises: UsageError for an option that the command does not have.
    """
    options = {each.name: each.opts[-1] for each in ctx.command.params}
    first = options[next(iter(given))]
    command = dlion.get_command(ctx, name) if is_for_clusters(name) else None
    if command is None:
        raise click.UsageError(f"{name} does not use a cluster: remove {first}")
    known = {option: each.name for each in command.params for option in each.opts}
    if isinstance(command, click.Group):
        return {each: dict(given) for each in command.commands}
    if unknown := next((each for each in map(options.get, given) if each not in known), None):
        raise click.UsageError(f"{name} does not use {unknown}: remove it")
    return {str(known[str(options[each])]): value for each, value in given.items()}


def run(arguments: list[str] | None) -> int:
    """Run the command and return its exit code; None: the arguments of this process."""
    try:
        try:
            result = dlion.main(args=arguments, prog_name=_program_name(), standalone_mode=False)
        finally:
            exit_on_later_signals()
    except click.ClickException as error:
        error.show()
        if isinstance(error, click.NoSuchOption) and error.option_name in ("-f", "--filename"):
            click.echo("A FILE is an argument here, without an option.", err=True)
        return error.exit_code
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.Abort as abort:
        take_interrupt(abort)
        return _fail(KeyboardInterrupt())
    except SystemExit as ended:
        # After a closed pipe click exits so, and rich while it handles the error.
        if _has_reader_left() or isinstance(ended.__context__, BrokenPipeError):
            return 128 + signal.SIGPIPE
        raise  # the end of a completion
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the outermost handler
        take_interrupt(error)
        return _fail(error)
    return result if isinstance(result, int) else 0


def _has_reader_left() -> bool:
    """Whether the reader of standard output or standard error has closed its pipe."""
    poll = select.poll()
    poll.register(1, 0)
    poll.register(2, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _program_name() -> str:
    """The name in usage messages. As a kubectl plugin (`kubectl-dlion`) it is two words."""
    return "kubectl dlion" if Path(sys.argv[0]).name == "kubectl-dlion" else "dlion"


def _fail(error: BaseException) -> int:
    if isinstance(error, ProgramError) and error.__cause__ is not None:
        click.echo(program_traceback(error.__cause__), err=True)
    # Names in manifests, of files and of servers may hold terminal escapes.
    click.echo(f"dlion: {printable_lines(message_of(error))}", err=True)
    return int(exit_code_of(error))


def _joined_values(command: click.Command, arguments: Sequence[str]) -> list[str]:
    """The arguments with `-n=NAME`, a form of kubectl, as `-nNAME`, up to `--`.

    Raises: UsageError for an option without a value, or a value of a flag.
    """
    options = {name: option for option in _options(command) for name in option.opts}
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [*(_joined(each, options) for each in arguments[:end]), *arguments[end:]]


def _reject_late_options(arguments: Sequence[str]) -> None:
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
