"""The `dlion` command: its subcommands by name, loaded when asked for.

`dlion --help`, `validate`, `explain` and `init` so need neither TensorFlow nor gRPC.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import click

from dlion_cli.failures import exit_code_of, message_of

COMMANDS: Final = {
    "run": ("dlion_cli.run:run", "Train a job on this machine."),
    "simulate": ("dlion_cli.simulate:simulate", "Train a job in virtual time."),
    "compare": ("dlion_cli.compare:compare", "Compare policies in simulated runs."),
    "replay": ("dlion_cli.replay:replay", "Simulate a recorded run again, under other settings."),
    "calibrate": ("dlion_cli.calibrate:calibrate", "Measure what a step costs on this machine."),
    "submit": ("dlion_cli.submit:submit", "Submit jobs to a cluster."),
    "get": ("dlion_cli.get:get", "Show jobs of a cluster."),
    "watch": ("dlion_cli.watch:watch", "Watch a job of a cluster train."),
    "logs": ("dlion_cli.logs:logs", "Show what the workers of a job say."),
    "fetch": ("dlion_cli.fetch:fetch", "Bring a job's model or results here."),
    "suspend": ("dlion_cli.suspending:suspend", "Stop a job's workers and keep the job."),
    "resume": ("dlion_cli.suspending:resume", "Start a suspended job's workers again."),
    "delete": ("dlion_cli.delete:delete", "Delete jobs from a cluster."),
    "trust": ("dlion_cli.trust:trust", "Exchange sites' public certificates."),
    "preflight": ("dlion_cli.preflight:preflight", "Check several sites before a run."),
    "report": ("dlion_cli.report:report", "Make report.html of a result folder."),
    "validate": ("dlion_cli.validate:validate", "Check manifests."),
    "explain": ("dlion_cli.explain:explain", "Say what a field of the manifest means."),
    "init": ("dlion_cli.init:init", "Write a manifest and a program to start from."),
}


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
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command), cmd_name
        return command

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002 - click's signature
        formatter: click.HelpFormatter,
    ) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, words) for name, (_, words) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dlion", prog_name="dlion")
def dlion() -> None:
    """Decentralised training of deep models across the edge."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code (`dlion_api.exit_codes`).

    Without `arguments` it is the process's: that ends with this code, whatever threads of gRPC and
    TensorFlow still do. One that asks for the interpreter while that is taken down aborts.
    """
    if arguments is not None:
        return _run(arguments)
    codes: list[int] = []
    atexit.register(_leave, codes)  # first to come, last to be called
    codes.append(_run(None))
    return codes[0]


def _leave(codes: list[int]) -> None:
    if not codes:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # nobody reads it, or it is closed
            stream.flush()
    os._exit(codes[0])


def _run(arguments: list[str] | None) -> int:
    try:
        result = dlion.main(args=arguments, prog_name=_program(), standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.Abort:
        return _fail(KeyboardInterrupt())
    except BrokenPipeError:  # the reader of a pipe had enough
        sys.stderr.close()
        return 0
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the outermost border
        return _fail(error)
    return result if isinstance(result, int) else 0


def _program() -> str:
    """What the user typed; as kubectl's plugin (`kubectl-dlion` on the PATH) that is two words."""
    return "kubectl dlion" if Path(sys.argv[0]).name == "kubectl-dlion" else "dlion"


def _fail(error: BaseException) -> int:
    click.echo(f"dlion: {message_of(error)}", err=True)
    return int(exit_code_of(error))


if __name__ == "__main__":
    sys.exit(main())
