"""Compare the rates and quotas that an environment requests with those of this machine.

    python benchmarks/network.py [ENVIRONMENT] [--unprivileged] [--seconds 3]

Transfers are real: over the shaped links, each worker to the next at once, then over the first
worker's links together. Then one process per worker burns CPU under its quota. As root it uses
network namespaces and control groups, otherwise (or with --unprivileged) relay and duty cycle.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_environments.loading import load_environment
from dlion_environments.model import Environment
from dlion_environments.plan import BYTES_PER_MBIT
from dlion_local.emulation.emulation import EmulatedEnvironment, enter_command
from dlion_local.emulation.measurement import TransferMeasurement, measure_transfers
from dlion_results.run_folder.environment import QUOTA, EnvironmentFigure
from transfer_windows import windows_bytes_per_s

BURN = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"


def workers_for(environment: Environment) -> tuple[WorkerIdentity, ...]:
    """Return identities that fit the environment."""
    counts = [site.workers for site in environment.sites] or [environment.worker_count]
    members = [(site, index) for site, count in enumerate(counts) for index in range(count)]
    return tuple(
        WorkerIdentity(Rank(rank), SiteName(f"site-{site}"), "g", index)
        for rank, (site, index) in enumerate(members)
    )


def show_links(imposed: EmulatedEnvironment, seconds: float) -> None:
    """Print a line per link: requested, carried, and the maximum in any second."""
    count = len(imposed.plan.workers)
    ring = [(Rank(k), Rank((k + 1) % count)) for k in range(count)]
    fan = [(Rank(0), Rank(k)) for k in range(1, count)]
    print(f"{'link':>8} {'asked':>9} {'carried':>9} {'ratio':>6} {'most in 1 s':>11}   Mbit/s")
    for title, pairs in (("each to the next", ring), ("worker 0 to all", fan)):
        transfers = measure_transfers(imposed.network, pairs, seconds)
        print(f"  {title}:")
        for one in transfers:
            print(link_line(imposed, one))


def link_line(imposed: EmulatedEnvironment, one: TransferMeasurement) -> str:
    """Return one link's figures."""
    asked = imposed.plan.initial.link_bytes_per_s(one.sender, one.receiver) / BYTES_PER_MBIT
    carried = one.bytes_per_s(skip_s=0.5) / BYTES_PER_MBIT
    most = max(windows_bytes_per_s(one, 1.0), default=0.0) / BYTES_PER_MBIT
    name = f"{one.sender} → {one.receiver}"
    return f"{name:>8} {asked:9.1f} {carried:9.2f} {carried / asked:6.3f} {most:11.2f}"


def show_quotas(imposed: EmulatedEnvironment, seconds: float) -> None:
    """Print a line per worker: quota, and CPU of a process that can use a whole core."""
    ranks = [worker.rank for worker in imposed.plan.workers]
    burning = [
        subprocess.Popen(
            [*enter_command(imposed.enter_arguments(rank)), sys.executable, "-c", BURN],
            start_new_session=True,
        )
        for rank in ranks
    ]
    try:
        time.sleep(1.0)
        for rank in ranks:
            imposed.apply_quota(rank)
        time.sleep(seconds)
        compared = imposed.requested_and_measured()
    finally:
        for process in burning:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    print(f"{'worker':>8} {'quota':>9} {'used':>9} {'ratio':>6}   cores")
    for one in compared:
        if one.quantity == QUOTA:
            print(quota_line(one))
    for one in itertools.islice((c for c in compared if c.measured is None), 1):
        print(f"  {one.note}")


def quota_line(one: EnvironmentFigure) -> str:
    """Return one worker's figures."""
    requested, measured = one.requested or 0.0, one.measured or 0.0
    return f"{one.rank:>8} {requested:9.3f} {measured:9.3f} {measured / requested:6.3f}"


def main() -> None:
    """Apply the environment, measure, print."""
    parser = argparse.ArgumentParser(description="Requested against measured.")
    parser.add_argument("environment", nargs="?", default="hetero-sys-a")
    parser.add_argument("--unprivileged", action="store_true")
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    environment = load_environment(options.environment)
    cores = len(os.sched_getaffinity(0))
    plan = environment.plan(workers_for(environment), cores, duration_s=3600)
    privileged = False if options.unprivileged else None
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(EmulatedEnvironment(plan, work_dir=Path(folder), privileged=privileged)) as imposed,
    ):
        imposed.start()
        print(f"{environment.name}: links by {imposed.link_backend}, CPU by {imposed.cpu_backend}")
        show_links(imposed, options.seconds)
        show_quotas(imposed, options.seconds)


if __name__ == "__main__":
    main()
