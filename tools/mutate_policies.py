"""Checks that the tests of each policy, rule and lossy codec detect a change of its central line.

    python tools/mutate_policies.py [POLICY ...]

Changes one line in a copy of `worker/` and runs its tests, which must pass without the change
and fail with it. The exit code is 1 if a change is not detected, if the tests fail without it, or
if the line is missing. After rewriting a policy, update its line here.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS_FAILED, TIMEOUT_S = 1, 300


@dataclass(frozen=True)
class Mutation:
    """A line of a policy, its replacement, and the tests that must then fail."""

    module: str
    before: str
    after: str
    tests: str


CENTRAL_LINES: dict[str, Mutation] = {
    "clustered": Mutation(
        "dlion_core/topology/clusters.py",
        "if rate > level:",
        "if rate < level:",
        "tests/property/test_clusters.py",
    ),
    "clustered, hysteresis": Mutation(
        "dlion_core/topology/regrouping.py",
        "if wanted is None or (self._times < PATIENCE and not is_first):",
        "if wanted is None:",
        "tests/property/test_clusters.py",
    ),
    "clustered, agreement": Mutation(
        "dlion_core/topology/grouping.py",
        "if grouping <= self.held:",
        "if grouping.version < self.held.version:",
        "tests/property/test_clusters.py",
    ),
    "folding": Mutation(
        "dlion_core/policies/partitions/partition_merge.py",
        "self._samples.merge(theirs, then, self._min_samples)",
        "pass",
        "tests/property/test_partition_merge.py",
    ),
    "full": Mutation(
        "dlion_core/policies/aggregation.py",
        "weight = np.float32(contribution.local_batch_size / divisor)",
        "weight = np.float32(1 / divisor)",
        "tests/unit/policies/test_gradient_exchange.py",
    ),
    "dlion": Mutation(
        "dlion_core/policies/gradient/magnitudes.py",
        "cut_L = self._cuts(np.float32(threshold))",
        "cut_L = self._cuts(np.float32(threshold / 2))",
        "tests/property/test_selection.py",
    ),
    "dlion, prioritization": Mutation(
        "dlion_core/policies/gradient/gradient_policies.py",
        "if not exchange.prioritization:",
        "if False:",
        "tests/unit/policies/test_gradient_exchange.py",
    ),
    "selective, prioritization": Mutation(
        "dlion_core/policies/gradient/gradient_policies.py",
        "exchange.floor_percent if exchange.prioritization else None",
        "exchange.floor_percent",
        "tests/unit/policies/test_gradient_exchange.py",
    ),
    "dlion-published": Mutation(
        "dlion_core/policies/aggregation.py",
        "return len(local_batch_sizes) * local_batch_sizes[own]",
        "return sum(local_batch_sizes.values())",
        "tests/unit/policies/test_gradient_exchange.py",
    ),
    "selective propagation": Mutation(
        "dlion_core/policies/gradient/selective_propagation.py",
        "key=lambda peer: (-score(peer), self._turn(peer))",
        "key=lambda peer: (score(peer), self._turn(peer))",
        "tests/property/test_selective.py",
    ),
    "knowledge transfer, merging": Mutation(
        "dlion_worker/training/replica.py",
        "weights_D *= np.float32(1.0 - fraction)",
        "weights_D *= np.float32(fraction)",
        "tests/unit/trainer/test_replica.py",
    ),
    "folding, moments": Mutation(
        "dlion_worker/training/optimizer.py",
        "moves = factor / (1 - factor)",
        "moves = factor",
        "tests/unit/training/test_optimizer.py",
    ),
    "folding, with whom": Mutation(
        "dlion_core/policies/partitions/partition_merge.py",
        "peer = min(missed, key=lambda one: self._vectors[one].lost)",
        "peer = missed[0]",
        "tests/property/test_partition_merge.py",
    ),
    "folding, of one moment": Mutation(
        "dlion_core/policies/partitions/partition_merge.py",
        "pull.snapshot_after(message.iteration)",
        "pull.snapshot_after(0)",
        "tests/property/test_partition_merge.py",
    ),
    "knowledge transfer": Mutation(
        "dlion_core/policies/knowledge_transfer.py",
        "best = min(loss_by_rank",
        "best = max(loss_by_rank",
        "tests/unit/policies/test_knowledge_transfer.py",
    ),
    "weighted batches": Mutation(
        "dlion_core/resource_control/batching.py",
        "rest * (value / peak) / total",
        "rest / len(capacity)",
        "tests/property/test_batching.py",
    ),
    "none": Mutation(
        "dlion_core/policies/gradient/gradient_policies.py",
        "gradient_machine(context, NoExchange())",
        "gradient_machine(context, WholeGradient(context.coding))",
        "tests/unit/policies/test_gradient_exchange.py",
    ),
    "even batches": Mutation(
        "dlion_core/resource_control/resource_controller.py",
        'weighted=job.spec.batching.policy != "even"',
        "weighted=True",
        "tests/unit/sidecar/test_resource_controller.py",
    ),
    "growing batch": Mutation(
        "dlion_core/resource_control/batching.py",
        "wanted = math.ceil(self._size * growth.factor)",
        "wanted = self._size + growth.initial",
        "tests/property/test_batching.py",
    ),
    "bounded staleness": Mutation(
        "dlion_core/policies/synchronization.py",
        "Rule(slack=max_staleness, spare=0, barrier=False)",
        "Rule(slack=None, spare=0, barrier=False)",
        "tests/property/test_machine_schedules.py",
    ),
    "backup workers": Mutation(
        "dlion_core/policies/synchronization.py",
        "Rule(slack=0, spare=backup_workers, barrier=True)",
        "Rule(slack=0, spare=0, barrier=True)",
        "tests/property/test_machine_schedules.py",
    ),
    "bipartite": Mutation(
        "dlion_core/topology/topology.py",
        "(even, odds[(at + step) % side])",
        "(even, odds[step % side])",
        "tests/property/test_topology.py",
    ),
    "stochastic rounding": Mutation(
        "dlion_core/codecs/quantized.py",
        "np.floor(ratio + chance)",
        "np.floor(ratio)",
        "tests/property/test_quantized.py",
    ),
    "polyline": Mutation(
        "dlion_core/codecs/polyline.py",
        "rest = _zigzag(rounded - before)\n        before = rounded\n        groups += 1",
        "rest = _zigzag(rounded)\n        before = rounded\n        groups += 1",
        "tests/property/test_polyline.py",
    ),
    "topk": Mutation(
        "dlion_core/policies/gradient/topk.py",
        "self._shared.value_D += gradient_D",
        "self._shared.value_D[:] = gradient_D",
        "tests/property/test_topk.py",
    ),
    "ako": Mutation(
        "dlion_core/policies/gradient/ako.py",
        "self._turn = (self._turn + 1) % self._partitions",
        "self._turn = 0",
        "tests/property/test_ako.py",
    ),
    "gaia": Mutation(
        "dlion_core/policies/weights/gaia.py",
        "(np.abs(accumulated_D) > bound_D)",
        "(np.abs(accumulated_D) < bound_D)",
        "tests/property/test_gaia.py",
    ),
    "hop": Mutation(
        "dlion_core/policies/weights/hop.py",
        "np.float32(counts[rank] / total) * weights_of[rank][1]",
        "np.float32(1 / len(weights_of)) * weights_of[rank][1]",
        "tests/property/test_hop.py",
    ),
    "adpsgd": Mutation(
        "dlion_core/policies/weights/adpsgd.py",
        "(ours_D + theirs_D) * np.float32(0.5)",
        "(ours_D + theirs_D) * np.float32(0.25)",
        "tests/property/test_adpsgd.py",
    ),
    "async": Mutation(
        "dlion_core/policies/gradient/asynchronous.py",
        "gradient_D += self._lambda * gradient_D * gradient_D * moved_D",
        "gradient_D -= self._lambda * gradient_D * gradient_D * moved_D",
        "tests/property/test_async.py",
    ),
    "d2": Mutation(
        "dlion_core/policies/weights/d2.py",
        "self._half_D += self._correction_D",
        "self._half_D -= self._correction_D",
        "tests/property/test_d2.py",
    ),
    "d2, restart": Mutation(
        "dlion_core/policies/weights/d2.py",
        "self._restarts.add(restart)",
        "self._restarts.discard(restart)",
        "tests/property/test_d2_restarts.py",
    ),
    "adacomp": Mutation(
        "dlion_core/policies/gradient/adacomp.py",
        "gradient_D /= np.maximum(since_D, np.uint32(1)).astype(np.float32)",
        "gradient_D /= np.float32(1)",
        "tests/property/test_adacomp.py",
    ),
    "dgc": Mutation(
        "dlion_core/policies/gradient/dgc.py",
        "self._velocity_D[is_sent_D] = 0",
        "self._velocity_D[~is_sent_D] = 0",
        "tests/property/test_dgc.py",
    ),
    "eventgrad": Mutation(
        "dlion_core/policies/weights/eventgrad.py",
        "fired_L: VariableMask = change_L >= self.threshold_L",
        "fired_L: VariableMask = change_L < self.threshold_L",
        "tests/property/test_eventgrad.py",
    ),
    "goodput": Mutation(
        "dlion_core/resource_control/goodput.py",
        "(scale + initial) / (scale + batch)",
        "(scale + batch) / (scale + initial)",
        "tests/property/test_goodput.py",
    ),
    "twostep": Mutation(
        "dlion_core/policies/gradient/twostep.py",
        "self.threshold[peer] = max(lowest, self._parameters.threshold)",
        "self.threshold[peer] = min(lowest, self._parameters.threshold)",
        "tests/property/test_twostep.py",
    ),
    "fedat": Mutation(
        "dlion_core/policies/weights/fedat.py",
        "for count in reversed(counts)]",
        "for count in counts]",
        "tests/property/test_fedat.py",
    ),
    "hierarchical": Mutation(
        "dlion_core/policies/hierarchical/site_means.py",
        "np.float32(share.samples / samples))\n    return samples, mean_D",
        "np.float32(1 / len(shares)))\n    return samples, mean_D",
        "tests/property/test_hierarchical.py",
    ),
    "localsgd": Mutation(
        "dlion_core/policies/weights/localsgd.py",
        "delta_D = anchor_D - mean_D",
        "delta_D = mean_D - anchor_D",
        "tests/property/test_localsgd.py",
    ),
}


def main() -> int:
    """Print the result of each mutation."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("policies", nargs="*", metavar="POLICY", help=", ".join(CENTRAL_LINES))
    names = parser.parse_args().policies or list(CENTRAL_LINES)
    if unknown := [name for name in names if name not in CENTRAL_LINES]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(CENTRAL_LINES)}")
    survived = []
    with tempfile.TemporaryDirectory(prefix="dlion-mutate-") as temporary:
        copy = Path(temporary)
        shutil.copytree(ROOT / "worker", copy, symlinks=True, dirs_exist_ok=True)
        unchanged: dict[str, str] = {}
        for name in names:
            verdict = evaluate(copy, CENTRAL_LINES[name], unchanged)
            line = CENTRAL_LINES[name].after.partition("\n")[0]
            print(f"{name:26} {line[:60]:62} {verdict}", flush=True)
            if not verdict.startswith("caught"):
                survived.append(name)
    print(f"{len(names) - len(survived)} of {len(names)} caught")
    return 1 if survived else 0


def evaluate(copy: Path, mutation: Mutation, unchanged: dict[str, str]) -> str:
    """The result: the test that failed, or why the mutation was not detected.

    `unchanged` caches the problem of each test file without a change (empty if it passes).
    """
    path = copy / mutation.module
    text = path.read_text()
    if text.count(mutation.before) != 1:
        return f"NOT RUN: the line occurs {text.count(mutation.before)} times, not once"
    if mutation.tests not in unchanged:
        unchanged[mutation.tests] = _baseline_problem(_run_tests(copy, mutation.tests))
    if wrong := unchanged[mutation.tests]:
        return f"NOT JUDGED: {wrong}"
    path.write_text(text.replace(mutation.before, mutation.after))
    try:
        return _verdict(_run_tests(copy, mutation.tests))
    finally:
        path.write_text(text)


def _run_tests(copy: Path, tests: str) -> subprocess.CompletedProcess[str] | None:
    """Run these tests on that copy; None after a time-out."""
    sources = [copy, *(ROOT / name for name in ("api", "operator", "cli"))]
    paths = os.pathsep.join(map(str, sources))
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tests]
    try:
        return subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None


def _baseline_problem(run: subprocess.CompletedProcess[str] | None) -> str:
    """Why the tests are unusable without the change; empty if they pass."""
    if run is None:
        return "the tests do not end without the change either"
    if run.returncode == 0:
        return ""
    which = f" ({failed[0]})" if (failed := _failed(run)) else ""
    return f"pytest ends with {run.returncode} without the change, too{which}"


def _verdict(run: subprocess.CompletedProcess[str] | None) -> str:
    if run is None:
        return "NOT CAUGHT: the tests did not end"
    if run.returncode == TESTS_FAILED and (failed := _failed(run)):
        return f"caught by {failed[0]}"
    return f"NOT CAUGHT: pytest ended with {run.returncode}"


def _failed(run: subprocess.CompletedProcess[str]) -> list[str]:
    """The names of the failed tests."""
    lines = [line for line in run.stdout.splitlines() if line.startswith("FAILED")]
    return [line.split(" - ")[0].rpartition("::")[2] for line in lines]


if __name__ == "__main__":
    sys.exit(main())
