"""What the operator costs while there is nothing for it to do.

    python benchmarks/operator_at_rest.py [--jobs 300] [--seconds 120]

As root. An API server of the testbed without nodes, the operator as a process beside it: first
without a job, then with one whose pods fit nowhere, then with so many suspended ones, then started
anew with them. Each is watched for so long after the operator has had nothing to do for ten
seconds; requests are counted by a proxy. Exit code 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from fault_proxy import FaultProxy, waited  # noqa: E402
from operator_process import OperatorProcess  # noqa: E402
from podless_jobs import manifest, state_of  # noqa: E402
from testbed.kubectl import Kubectl  # noqa: E402
from testbed.sites import Testbed  # noqa: E402

CORE_BAR = 0.01
REST_BAR_MB, SUSPENDED_BAR_MB = 150, 220
QUIET_S = 10.0
START_S = 300.0


@dataclass(frozen=True)
class Rest:
    """A stretch of time in which nothing was to be done."""

    what: str
    bar_mb: int
    memory_mb: float
    core: float
    """Share of one."""
    requests_per_minute: float
    changes: int

    @property
    def within(self) -> bool:
        """Whether the bars are kept."""
        return self.memory_mb <= self.bar_mb and self.core <= CORE_BAR and not self.changes

    def __str__(self) -> str:
        return (
            f"| {self.what} | {self.memory_mb:.0f} MB | {self.core:.2%} | "
            f"{self.requests_per_minute:.0f} | {self.changes} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=300, help="suspended jobs (300)")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each stretch (120)")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="dlion-rest-") as folder,
        Testbed.up(name=f"b{os.getpid()}", sites=1, nodes=0) as testbed,
    ):
        kubectl = replace(testbed.site("site-a").kubectl, namespace="default")
        kubectl.run("apply", "-f", str(ROOT / "crds" / "dlionjob.yaml"))
        assert waited(lambda: kubectl.knows("dlj"), 30), "DLionJobs are not served"
        rests = _measured(kubectl, Path(folder), options.jobs, options.seconds)
    print(f"bars: {REST_BAR_MB} MB, {SUSPENDED_BAR_MB} MB with suspended jobs, {CORE_BAR:.0%}\n")
    print("| operator | memory | of a core | requests/min | changes |\n|---|---|---|---|---|")
    print("\n".join(map(str, rests)))
    sys.exit(0 if all(rest.within for rest in rests) else 1)


def _measured(kubectl: Kubectl, folder: Path, jobs: int, seconds: float) -> list[Rest]:
    with (
        FaultProxy(kubectl.kubeconfig, folder) as proxy,
        OperatorProcess(folder, proxy.kubeconfig) as operator,
    ):
        rests = [_rest("without a job", REST_BAR_MB, operator, proxy, seconds)]
        kubectl.apply(manifest("waiting"))
        assert waited(lambda: bool(state_of(kubectl, "waiting")), 30), operator.last_words()
        kubectl.wait("--for=condition=Stalled", "dlj/waiting", timeout_s=120)
        rests.append(_rest("a job whose pods fit nowhere", REST_BAR_MB, operator, proxy, seconds))
        kubectl.run("delete", "dlj", "waiting")
        kubectl.apply(*(manifest(f"job-{number}", suspend=True) for number in range(jobs)))
        assert waited(lambda: _suspended(kubectl) == jobs, START_S), operator.last_words()
        for what in (f"{jobs} suspended jobs", "the same, started anew"):
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
    assert waited(lambda: proxy.is_quiet(QUIET_S), START_S), "the operator does not come to rest"
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
