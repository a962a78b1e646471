"""`dlion watch`: a job of a cluster as it trains, until its run has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dlion_cli.cluster_options import (
    cluster_options,
    contexts_option,
    name_argument,
    wait_timeout,
)
from dlion_cli.joined_watching import watch_joined
from dlion_cli.watching import watch_to_end

if TYPE_CHECKING:
    from dlion_cli.cluster_jobs import Jobs


@click.command()
@name_argument()
@click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text",
    help="json: the whole document in one line at each change.",
)  # fmt: skip
@wait_timeout
@contexts_option(watch_joined)
@cluster_options
def watch(jobs: Jobs, name: str, output: str, timeout_s: float | None) -> int:
    """Watch job NAME train: progress, ETA, metrics, sites, conditions, events.

    Ends when the run has, with exit code 0 after success; 79 where it ended before its stop rule
    was met, 80 where its model lacks a worker's replica; 65, 67 or 124 where manifest, program or
    deadline were the reason, else 1. A lost connection is made again. Ctrl-C leaves the job
    running. With --contexts it ends when the run has at all of them, with the first exit code that
    is not 0, in their order.

    \b
    dlion watch cifar10
    dlion watch cifar10 -o json | jq -c .status.trainerStatus
    dlion watch cifar10 --contexts plant-a,plant-b
    dlion watch cifar10 --timeout 600 || echo "not in time, or failed"
    """
    return watch_to_end(jobs, name, output=output, timeout_s=timeout_s)
