"""Several contexts of a kubeconfig, asked at the same time; one that fails hides no other.

Made by `cluster_options` for `--contexts`. Knows no command: a command hands in its question.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

import click

from dlion_api.errors import DLionError
from dlion_api.exit_codes import ExitCode
from dlion_cli.cluster import connect
from dlion_cli.cluster_jobs import Jobs
from dlion_cli.failures import exit_code_of, message_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

T = TypeVar("T")


class Contexts:
    """The jobs of several clusters, by the name of the context that leads there."""

    def __init__(
        self, names: Sequence[str], *, kubeconfig: str | None, namespace: str | None
    ) -> None:
        """Connects; sends nothing yet. Without a namespace each context's own is meant."""
        self.names = tuple(names)
        self.errors: dict[str, DLionError] = {}
        self._jobs: dict[str, Jobs] = {}
        for name in self.names:
            try:
                cluster = connect(kubeconfig=kubeconfig, context=name, namespace=namespace)
            except DLionError as error:
                self.errors[name] = error
            else:
                self._jobs[name] = Jobs(cluster)

    def ask(self, question: Callable[[Jobs], T]) -> dict[str, T]:
        """The answers by context, in the order given; what fails is kept in `errors`.

        The question is asked in a thread per context. Raises: whatever is no DLionError, such as
        a closed pipe.
        """
        answers: dict[str, T] = {}
        failures: dict[str, BaseException] = {}

        def one(name: str, jobs: Jobs) -> None:
            try:
                answers[name] = question(jobs)
            except BaseException as error:  # noqa: BLE001 - raised below, in the thread that asks
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

    def end(self, codes: Mapping[str, int] | None = None) -> int:
        """Says what failed; the exit code of the first context, in the order given, that has one.

        `codes` are those of contexts that answered, where an answer may be a failure itself.
        """
        for name in self.names:
            if name in self.errors:
                click.echo(f"dlion: context {name}: {message_of(self.errors[name])}", err=True)
        failed = {name: int(exit_code_of(error)) for name, error in self.errors.items()}
        found = {**(codes or {}), **failed}
        return next((found[name] for name in self.names if found.get(name)), ExitCode.OK)

    def close(self) -> None:
        """Let the connections go."""
        for jobs in self._jobs.values():
            jobs.cluster.close()
