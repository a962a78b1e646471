"""Queries several contexts of a kubeconfig in parallel; one failure does not hide the others."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import click

from dlion_api.errors import DLionError
from dlion_api.exit_codes import ExitCode
from dlion_cli.cluster.client import connect
from dlion_cli.cluster.cluster_jobs import JobClient
from dlion_cli.cluster.connection_settings import ConnectionSettings
from dlion_cli.terminal.failures import exit_code_of, message_of
from dlion_cli.terminal.formatting import printable_lines

T = TypeVar("T")


class Contexts:
    """The jobs of several clusters, by context name."""

    def __init__(self, names: Sequence[str], settings: ConnectionSettings) -> None:
        """Sends no request. Without a namespace, each context's own applies."""
        self.names = tuple(names)
        self.errors: dict[str, DLionError] = {}
        self._jobs: dict[str, JobClient] = {}
        for name in self.names:
            try:
                cluster = connect(replace(settings, context=name))
            except DLionError as error:
                self.errors[name] = error
            else:
                self._jobs[name] = JobClient(cluster)

    def query(self, function: Callable[[JobClient], T]) -> dict[str, T]:
        """Call the function for each context in a thread; return the results in order.

        DLionErrors are kept in `errors`. Raises: any other error, such as a closed pipe.
        """
        answers: dict[str, T] = {}
        failures: dict[str, BaseException] = {}

        def one(name: str, jobs: JobClient) -> None:
            try:
                answers[name] = function(jobs)
            except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
                failures[name] = error

        threads = [
            threading.Thread(target=one, args=each, daemon=True, name=f"context {each[0]}")
            for each in self._jobs.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name, error in failures.items():
            if not isinstance(error, DLionError):
                raise error
            self.errors[name] = error
        return {name: answers[name] for name in self.names if name in answers}

    def report_errors(self, codes: Mapping[str, int] | None = None) -> int:
        """Print the errors; return the first exit code that is not 0, in the order of the contexts.

        `codes`: exit codes of contexts without an error.
        """
        for name in self.names:
            if name in self.errors:
                text = printable_lines(message_of(self.errors[name]))
                click.echo(f"dlion: context {name}: {text}", err=True)
        failed = {name: int(exit_code_of(error)) for name, error in self.errors.items()}
        all_codes = {**(codes or {}), **failed}
        return next((all_codes[name] for name in self.names if all_codes.get(name)), ExitCode.OK)

    def close(self) -> None:
        """Close the connections."""
        for jobs in self._jobs.values():
            jobs.cluster.close()
