"""Measure the cost of an idle operator.

    python benchmarks/operator_at_rest.py [alone|idle|training] [--jobs 300] [--seconds 120]

Run as root. `alone`: an API server of the testbed without nodes, and the operator as a process. It
has no job, then one whose pods fit on no node, then suspended ones, then a restart with these. Each
state is measured for the given time after ten idle seconds; a proxy counts requests.

`idle` and `training`: three such API servers and federated operators, with the same job. Its pods
fit on no node; or a worker and a keeper at each site train, as processes with their pods' ConfigMap
and tokens. The script counts the status patches of each site (maximum in any minute) while no
condition changes, and the bytes between operators on each link.

Without an argument all three run. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "benchmarks" / "federation")]

from link_bytes import Link, link_bytes  # noqa: E402

from fault_proxy import FaultProxy, waited  # noqa: E402
from local_run import job_document  # noqa: E402
from operated_sites import (  # noqa: E402
    OperatedPods,
    OperatedSite,
    max_in_a_minute,
    operated_sites,
)
from operator_process import OperatorProcess  # noqa: E402
from podless_jobs import manifest, state_of  # noqa: E402
from testbed.kubectl import Kubectl  # noqa: E402
from testbed.sites import Testbed  # noqa: E402

CORE_BAR = 0.01
REST_BAR_MB, SUSPENDED_BAR_MB = 150, 220
PATCHES_BAR = 6
"""Status patches of one site in any minute without a change of a condition."""
LINK_BAR_BYTES_PER_S = 2000
"""Both directions together, headers included."""
SITES, JOB = ("plant-a", "plant-b", "plant-c"), "test"
QUIET_S = 10.0
START_S = 300.0


@dataclass(frozen=True)
class Rest:
    """A period in which the operator is idle."""

    what: str
    bar_mb: int
    memory_mb: float
    core: float
    """Share of one core."""
    requests_per_minute: float
    changes: int

    @property
    def within(self) -> bool:
        """Report whether the bars are met."""
        return self.memory_mb <= self.bar_mb and self.core <= CORE_BAR and not self.changes

    def __str__(self) -> str:
        return (
            f"| {self.what} | {self.memory_mb:.0f} MB | {self.core:.2%} | "
            f"{self.requests_per_minute:.0f} | {self.changes} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("which", nargs="?", choices=("alone", "idle", "training"), help="(all)")
    parser.add_argument("--jobs", type=int, default=300, help="suspended jobs (300)")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each stretch (120)")
    options = parser.parse_args()
    kept = True
    for which in [options.which] if options.which else ["alone", "idle", "training"]:
        with tempfile.TemporaryDirectory(prefix="dlion-rest-") as folder:
            if which == "alone":
                kept &= _alone(Path(folder), options.jobs, options.seconds)
            else:
                kept &= _federated(Path(folder), options.seconds, trains=which == "training")
    sys.exit(0 if kept else 1)


def _alone(folder: Path, jobs: int, seconds: float) -> bool:
    """Print the cost of one operator; report whether its bars are met."""
    with Testbed.up(name=f"b{os.getpid()}", sites=1, nodes=0) as testbed:
        kubectl = _knowing_jobs(testbed, "site-a")
        rests = _measured(kubectl, folder, jobs, seconds)
    print(f"bars: {REST_BAR_MB} MB, {SUSPENDED_BAR_MB} MB with suspended jobs, {CORE_BAR:.0%}\n")
    print("| operator | memory | of a core | requests/min | changes |\n|---|---|---|---|---|")
    print("\n".join(map(str, rests)))
    return all(rest.within for rest in rests)


def _knowing_jobs(testbed: Testbed, site: str) -> Kubectl:
    kubectl = replace(testbed.site(site).kubectl, namespace="default")
    kubectl.run("apply", "-f", str(ROOT / "crds" / "dlionjob.yaml"))
    assert waited(lambda: kubectl.knows("dlj"), 30), "DLionJobs are not served"
    return kubectl


@dataclass(frozen=True)
class Patches:
    """Status patches of one site in a period."""

    what: str
    site: str
    count: int
    max_in_a_minute: int
    changed: bool
    """Whether a condition changed."""

    @property
    def within(self) -> bool:
        """Report whether the bar is met and the period counts."""
        return self.max_in_a_minute <= PATCHES_BAR and not self.changed

    def __str__(self) -> str:
        changed = "a condition has changed" if self.changed else ""
        return f"| {self.what} | {self.site} | {self.count} | {self.max_in_a_minute} | {changed} |"


def _federated(folder: Path, seconds: float, *, trains: bool) -> bool:
    """Print the operators' writes for a job of three sites, and their traffic; report whether bars
    are met.
    """
    batch = {"initial": 256, "max": 256, "growth": False}
    document = job_document(
        dict.fromkeys(SITES, 1),
        trainer={"stop": {"maxSteps": 10**7}, "hashWeights": False},
        batching={"policy": "even", "globalBatchSize": batch},
        runId="r1",
    )
    document["metadata"]["namespace"] = "default"
    with ExitStack() as stack:
        testbed = stack.enter_context(Testbed.up(name=f"b{os.getpid()}", sites=len(SITES), nodes=0))
        kubectls = {
            name: _knowing_jobs(testbed, there)
            for name, there in zip(SITES, testbed.sites, strict=True)
        }
        sites = stack.enter_context(operated_sites(folder, kubectls))
        for site in sites:
            site.kubectl.apply(document)
        if trains:
            for number, site in enumerate(sites):
                pods = OperatedPods(folder / site.name, document, site, subnet=41 + number)
                stack.callback(pods.close)
                pods.start_keeper()
                pods.start_worker(number)
            found, links = _patches("it trains", sites, _trains, seconds)
        else:
            found, links = _patches("its pods fit nowhere", sites, _is_stalled, seconds)
    print(f"\nbar: {PATCHES_BAR} status patches of a site in any minute\n")
    print("| job | site | status patches | most in a minute | |\n|---|---|---|---|---|")
    print("\n".join(map(str, found)))
    print(f"\nbar: {LINK_BAR_BYTES_PER_S} bytes/s on a link between operators, both ways\n")
    print("| link | bytes/s |\n|---|---|")
    for (one, other), rate in sorted(links.items()):
        print(f"| {one} and {other} | {rate:.0f} |")
    are_all_there = len(links) == len(SITES) * (len(SITES) - 1) // 2
    # A negative rate: a connection was replaced, and its counters restarted.
    is_little = all(0 <= rate <= LINK_BAR_BYTES_PER_S for rate in links.values())
    return are_all_there and is_little and all(each.within for each in found)


def _is_stalled(site: OperatedSite) -> bool:
    return any(each[:2] == ("Stalled", "True") for each in site.conditions(JOB))


def _trains(site: OperatedSite) -> bool:
    return site.status(JOB).get("state") == "Training"


def _patches(
    what: str, sites: list[OperatedSite], stands: Callable[[OperatedSite], bool], seconds: float
) -> tuple[list[Patches], dict[Link, float]]:
    """Return the patches of each site and the bytes/s on each link, once the job is in this state
    and no condition has changed for a while.
    """

    def settled() -> bool:
        before = [site.conditions(JOB) for site in sites]
        if not all(map(stands, sites)):
            return False
        time.sleep(2 * QUIET_S)
        return before == [site.conditions(JOB) for site in sites]

    assert waited(settled, START_S), [site.status(JOB) for site in sites]
    ports = {site.operator.settings["federation"]["port"]: site.name for site in sites}
    pids = {site.operator.pid: site.name for site in sites}
    before = [(site.conditions(JOB), len(site.proxy.requests)) for site in sites]
    sent, began_s = link_bytes(ports, pids), time.monotonic()
    time.sleep(seconds)
    passed_s = time.monotonic() - began_s
    links = {
        link: (n - sent.get(link, 0)) / passed_s for link, n in link_bytes(ports, pids).items()
    }
    found = []
    for site, (conditions, count) in zip(sites, before, strict=True):
        moments_s = [
            request.at_s
            for request in site.proxy.requests[count:]
            if request.mutating and request.path.endswith(f"/dlionjobs/{JOB}/status")
        ]
        most = max_in_a_minute(moments_s)
        changed = conditions != site.conditions(JOB)
        found.append(Patches(what, site.name, len(moments_s), most, changed))
    return found, links


def _measured(kubectl: Kubectl, folder: Path, jobs: int, seconds: float) -> list[Rest]:
    with (
        FaultProxy(kubectl.kubeconfig, folder) as proxy,
        OperatorProcess(folder, proxy.kubeconfig) as operator,
    ):
        rests = [_rest("without a job", REST_BAR_MB, operator, proxy, seconds)]
        kubectl.apply(manifest("waiting"))
        assert waited(lambda: bool(state_of(kubectl, "waiting")), 30), operator.last_log_lines()
        kubectl.wait("--for=condition=Stalled", "dlj/waiting", timeout_s=120)
        rests.append(_rest("a job whose pods fit nowhere", REST_BAR_MB, operator, proxy, seconds))
        kubectl.run("delete", "dlj", "waiting")
        kubectl.apply(*(manifest(f"job-{number}", suspend=True) for number in range(jobs)))
        assert waited(lambda: _suspended(kubectl) == jobs, START_S), operator.last_log_lines()
        for what in (f"{jobs} suspended jobs", "the same, restarted"):
            rests.append(_rest(what, SUSPENDED_BAR_MB, operator, proxy, seconds))
            operator.kill()
            operator.start()
    return rests


def _suspended(kubectl: Kubectl) -> int:
    found = kubectl.get("dlj")["items"]
    return sum((each.get("status") or {}).get("state") == "Suspended" for each in found)


def _rest(
    what: str, bar_mb: int, operator: OperatorProcess, proxy: FaultProxy, seconds: float
) -> Rest:
    assert waited(lambda: proxy.is_quiet(QUIET_S), START_S), "the operator does not become idle"
    before, began_s, cpu_s = len(proxy.requests), time.monotonic(), operator.cpu_s()
    time.sleep(seconds)
    passed_s = time.monotonic() - began_s
    return Rest(
        what,
        bar_mb,
        operator.memory_mb(),
        (operator.cpu_s() - cpu_s) / passed_s,
        (len(proxy.requests) - before) * 60 / passed_s,
        len(proxy.mutations(before)),
    )


if __name__ == "__main__":
    main()
