"""`dlion watch`: watch a job of a cluster until its run ends."""

import click

from dlion_cli.cluster.cluster_jobs import JobClient
from dlion_cli.cluster.cluster_options import (
    cluster_options,
    contexts_option,
    name_argument,
    wait_timeout,
)
from dlion_cli.views.job_watch import watch_to_end
from dlion_cli.views.multi_context_watch import watch_contexts


@click.command()
@name_argument()
@click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text",
    help="json prints a line after each change.",
)  # fmt: skip
@wait_timeout
@contexts_option(watch_contexts)
@cluster_options
def watch(jobs: JobClient, name: str, output: str, timeout_s: float | None) -> int:
    """Watch job NAME: progress, ETA, metrics, sites, conditions and events.

    Ends when the run ends, with --contexts in all of them. Ctrl-C leaves the job running.

    The exit code, with --contexts the first other than 0: 0 succeeded; 79 ended before its stop
    condition; 80 the model lacks a replica; 65 invalid manifest; 67 failed program; 124 deadline
    exceeded; 1 other failures.

    \b
    dlion watch cifar10 --timeout 600 || echo "not in time, or failed"
    """
    return watch_to_end(jobs, name, output=output, timeout_s=timeout_s)
