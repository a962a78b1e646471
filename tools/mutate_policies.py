"""Flips the central line of each policy, rule and lossy codec; says whether its tests notice.

    python tools/mutate_policies.py [POLICY ...]

Each line is changed in a copy of `dlion_worker`, and the tests named with it are run on that copy:
once as it is, where they must pass, and once for each change, where they must fail.
Exit code 1 where a change goes unnoticed, where the tests fail without it and so tell nothing, or
where a line is no longer there: a policy that was rewritten needs its line here rewritten, too.
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
PACKAGE = "dlion_worker"
TESTS_FAILED, LONGEST_S = 1, 300


@dataclass(frozen=True)
class Mutation:
    """A line of a policy, what it becomes, and the tests that must fail then."""

    module: str
    before: str
    after: str
    tests: str


CENTRAL_LINES: dict[str, Mutation] = {
    "clustered": Mutation(
        "policies/clusters.py",
        "if rate > level:",
        "if rate < level:",
        "tests/property/test_clusters.py",
    ),
    "clustered, hysteresis": Mutation(
        "policies/regrouping.py",
        "if wanted is None or (self._times < PATIENCE and not is_first):",
        "if wanted is None:",
        "tests/property/test_clusters.py",
    ),
    "clustered, agreement": Mutation(
        "sidecar/groups.py",
        "if grouping <= self.held:",
        "if grouping.version < self.held.version:",
        "tests/property/test_clusters.py",
    ),
    "folding": Mutation(
        "policies/folding.py",
        "self._hold_besides(theirs, then)",
        "pass",
        "tests/property/test_folding.py",
    ),
    "full": Mutation(
        "policies/combining.py",
        "weight = np.float32(contribution.local_batch_size / divisor)",
        "weight = np.float32(1 / divisor)",
        "tests/unit/policies/test_machine.py",
    ),
    "dlion": Mutation(
        "policies/selection.py",
        "cut_L = self._cuts(np.float32(threshold))",
        "cut_L = self._cuts(np.float32(threshold / 2))",
        "tests/property/test_selection.py",
    ),
    "dlion, prioritization": Mutation(
        "policies/gradient_policies.py",
        "if not exchange.prioritization:",
        "if False:",
        "tests/unit/policies/test_machine.py",
    ),
    "selective, prioritization": Mutation(
        "policies/gradient_policies.py",
        "exchange.floor_percent if exchange.prioritization else None",
        "exchange.floor_percent",
        "tests/unit/policies/test_machine.py",
    ),
    "dlion-published": Mutation(
        "policies/combining.py",
        "return len(local_batch_sizes) * local_batch_sizes[own]",
        "return sum(local_batch_sizes.values())",
        "tests/unit/policies/test_machine.py",
    ),
    "selective propagation": Mutation(
        "policies/selective.py",
        "key=lambda peer: (-score(peer), self._turn(peer))",
        "key=lambda peer: (score(peer), self._turn(peer))",
        "tests/property/test_selective.py",
    ),
    "knowledge transfer, merging": Mutation(
        "trainer/replica.py",
        "weights_D *= np.float32(1.0 - fraction)",
        "weights_D *= np.float32(fraction)",
        "tests/unit/trainer/test_replica.py",
    ),
    "folding, moments": Mutation(
        "training/optimizer.py",
        "moves = factor / (1 - factor)",
        "moves = factor",
        "tests/unit/training/test_optimizer.py",
    ),
    "folding, with whom": Mutation(
        "policies/folding.py",
        "peer = min(missed, key=lambda one: self._said[one].lost)",
        "peer = missed[0]",
        "tests/property/test_folding.py",
    ),
    "folding, of one moment": Mutation(
        "policies/folding.py",
        "asked.after(message.iteration)",
        "asked.after(0)",
        "tests/property/test_folding.py",
    ),
    "knowledge transfer": Mutation(
        "policies/knowledge_transfer.py",
        "best = min(loss_by_rank",
        "best = max(loss_by_rank",
        "tests/unit/policies/test_knowledge_transfer.py",
    ),
    "weighted batches": Mutation(
        "policies/batching.py",
        "rest * (value / peak) / total",
        "rest / len(capacity)",
        "tests/property/test_batching.py",
    ),
    "none": Mutation(
        "policies/gradient_policies.py",
        "gradient_machine(context, Alone())",
        "gradient_machine(context, WholeGradient(context.coding))",
        "tests/unit/policies/test_machine.py",
    ),
    "even batches": Mutation(
        "sidecar/director.py",
        'weighted=job.spec.batching.policy != "even"',
        "weighted=True",
        "tests/unit/sidecar/test_director.py",
    ),
    "growing batch": Mutation(
        "policies/batching.py",
        "wanted = math.ceil(self._size * growth.factor)",
        "wanted = self._size + growth.initial",
        "tests/property/test_batching.py",
    ),
    "bounded staleness": Mutation(
        "policies/synchronization.py",
        "Rule(slack=max_staleness, spare=0, barrier=False)",
        "Rule(slack=None, spare=0, barrier=False)",
        "tests/property/test_machine_schedules.py",
    ),
    "backup workers": Mutation(
        "policies/synchronization.py",
        "Rule(slack=0, spare=backup_workers, barrier=True)",
        "Rule(slack=0, spare=0, barrier=True)",
        "tests/property/test_machine_schedules.py",
    ),
    "bipartite": Mutation(
        "policies/topology.py",
        "(even, odds[(at + step) % side])",
        "(even, odds[step % side])",
        "tests/property/test_topology.py",
    ),
    "stochastic rounding": Mutation(
        "codecs/quantized.py",
        "np.floor(ratio + chance)",
        "np.floor(ratio)",
        "tests/property/test_quantized.py",
    ),
    "polyline": Mutation(
        "codecs/polyline.py",
        "rest = _zigzag(rounded - before)\n        before = rounded\n        groups += 1",
        "rest = _zigzag(rounded)\n        before = rounded\n        groups += 1",
        "tests/property/test_polyline.py",
    ),
    "topk": Mutation(
        "policies/topk.py",
        "self._shared.value_D += gradient_D",
        "self._shared.value_D[:] = gradient_D",
        "tests/property/test_topk.py",
    ),
    "ako": Mutation(
        "policies/ako.py",
        "self._turn = (self._turn + 1) % self._partitions",
        "self._turn = 0",
        "tests/property/test_ako.py",
    ),
    "gaia": Mutation(
        "policies/gaia.py",
        "(np.abs(accumulated_D) > bound_D)",
        "(np.abs(accumulated_D) < bound_D)",
        "tests/property/test_gaia.py",
    ),
    "hop": Mutation(
        "policies/hop.py",
        "np.float32(counts[rank] / total) * found[rank][1]",
        "np.float32(1 / len(found)) * found[rank][1]",
        "tests/property/test_hop.py",
    ),
    "adpsgd": Mutation(
        "policies/adpsgd.py",
        "(ours_D + theirs_D) * np.float32(0.5)",
        "(ours_D + theirs_D) * np.float32(0.25)",
        "tests/property/test_adpsgd.py",
    ),
    "async": Mutation(
        "policies/asynchronous.py",
        "gradient_D += self._lambda * gradient_D * gradient_D * moved_D",
        "gradient_D -= self._lambda * gradient_D * gradient_D * moved_D",
        "tests/property/test_async.py",
    ),
    "d2": Mutation(
        "policies/d2.py",
        "self._half_D += self._correction_D",
        "self._half_D -= self._correction_D",
        "tests/property/test_d2.py",
    ),
    "d2, restart": Mutation(
        "policies/d2.py",
        "self._restarts.add(restart)",
        "self._restarts.discard(restart)",
        "tests/property/test_d2_restarts.py",
    ),
    "adacomp": Mutation(
        "policies/adacomp.py",
        "gradient_D /= np.maximum(since_D, np.uint32(1)).astype(np.float32)",
        "gradient_D /= np.float32(1)",
        "tests/property/test_adacomp.py",
    ),
    "dgc": Mutation(
        "policies/dgc.py",
        "self._velocity_D[is_sent_D] = 0",
        "self._velocity_D[~is_sent_D] = 0",
        "tests/property/test_dgc.py",
    ),
    "eventgrad": Mutation(
        "policies/eventgrad.py",
        "fired_L: Chosen = change_L >= self.threshold_L",
        "fired_L: Chosen = change_L < self.threshold_L",
        "tests/property/test_eventgrad.py",
    ),
    "goodput": Mutation(
        "policies/goodput.py",
        "(scale + initial) / (scale + batch)",
        "(scale + batch) / (scale + initial)",
        "tests/property/test_goodput.py",
    ),
    "twostep": Mutation(
        "policies/twostep.py",
        "self.threshold[peer] = max(lowest, self._parameters.threshold)",
        "self.threshold[peer] = min(lowest, self._parameters.threshold)",
        "tests/property/test_twostep.py",
    ),
    "fedat": Mutation(
        "policies/fedat.py",
        "for count in reversed(counts)]",
        "for count in counts]",
        "tests/property/test_fedat.py",
    ),
    "hierarchical": Mutation(
        "policies/site_means.py",
        "np.float32(share.samples / samples))\n    return samples, mean_D",
        "np.float32(1 / len(shares)))\n    return samples, mean_D",
        "tests/property/test_hierarchical.py",
    ),
    "localsgd": Mutation(
        "policies/localsgd.py",
        "delta_D = anchor_D - mean_D",
        "delta_D = mean_D - anchor_D",
        "tests/property/test_localsgd.py",
    ),
}


def main() -> int:
    """Prints a line for each policy."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("policies", nargs="*", metavar="POLICY", help=", ".join(CENTRAL_LINES))
    names = parser.parse_args().policies or list(CENTRAL_LINES)
    if unknown := [name for name in names if name not in CENTRAL_LINES]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(CENTRAL_LINES)}")
    survived = []
    with tempfile.TemporaryDirectory(prefix="dlion-mutate-") as temporary:
        copy = Path(temporary)
        shutil.copytree(ROOT / "worker" / PACKAGE, copy / PACKAGE, symlinks=True)
        unchanged: dict[str, str] = {}
        for name in names:
            verdict = tried(copy, CENTRAL_LINES[name], unchanged)
            line = CENTRAL_LINES[name].after.partition("\n")[0]
            print(f"{name:26} {line[:60]:62} {verdict}", flush=True)
            if not verdict.startswith("caught"):
                survived.append(name)
    print(f"{len(names) - len(survived)} of {len(names)} caught")
    return 1 if survived else 0


def tried(copy: Path, mutation: Mutation, unchanged: dict[str, str]) -> str:
    """What came of it: caught by which test, or why not.

    `unchanged` keeps what is wrong with a file of tests before anything is changed (nothing: they
    pass), so that each is run only once for that.
    """
    path = copy / PACKAGE / mutation.module
    text = path.read_text()
    if text.count(mutation.before) != 1:
        return f"NOT TRIED: the line is there {text.count(mutation.before)} times, not once"
    if mutation.tests not in unchanged:
        unchanged[mutation.tests] = _wrong_unchanged(_tested(copy, mutation.tests))
    if wrong := unchanged[mutation.tests]:
        return f"NOT JUDGED: {wrong}"
    path.write_text(text.replace(mutation.before, mutation.after))
    try:
        return _verdict(_tested(copy, mutation.tests))
    finally:
        path.write_text(text)


def _tested(copy: Path, tests: str) -> subprocess.CompletedProcess[str] | None:
    """What pytest says of these tests with that copy; None where it does not end."""
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
            timeout=LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None


def _wrong_unchanged(run: subprocess.CompletedProcess[str] | None) -> str:
    """Why the tests cannot be believed; nothing where they pass."""
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
    """Names of the tests that failed."""
    lines = [line for line in run.stdout.splitlines() if line.startswith("FAILED")]
    return [line.split(" - ")[0].rpartition("::")[2] for line in lines]


if __name__ == "__main__":
    sys.exit(main())
