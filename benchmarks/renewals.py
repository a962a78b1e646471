"""Measure the cost of renewing certificates and replacing connections during a run.

    python benchmarks/renewals.py [--life 120] [--times 4]

A worker at each of two sites trains in lock step, with keepers, coordinators and federation.
Certificates live for the given time, until every connection has been replaced the given number of
times. Connections are links, measurements, those of workers and keepers to their coordinators, and
those between operators. The script prints the count of each and each worker's longest iteration
beside its median. It counts iterations longer than twice the median near a renewal and at other
times, since other load of the machine also causes some.

Exit code 1 if an iteration is done twice or omitted, a link goes down, replicas differ, or a
warning is reported. It is also 1 if long iterations are more frequent near renewals (by chance once
in a hundred runs: Fisher's exact test).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from scipy.stats import fisher_exact  # noqa: E402

from renewed_run import RenewedRun, Slowness, renewed_run  # noqa: E402

BATCH = 4096
"""Samples of both workers together: a step then takes several tenths of a second, which is long
compared with short interruptions by other load."""
BY_CHANCE = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--life", type=float, default=120.0, help="of a certificate, seconds (120)")
    parser.add_argument("--times", type=int, default=4, help="that each is to be remade (4)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dlion-renewals-") as folder:
        life = timedelta(seconds=options.life)
        run = renewed_run(Path(folder), life=life, times=options.times, batch=BATCH)
    print(f"certificates of {options.life:g} s, {run.seconds:.0f} s\n")
    print("| connection | remade |\n|---|---|")
    print("\n".join(f"| {name} | {count} |" for name, count in run.remade.items()))
    print("\n| worker | iterations | median | longest | longer than two medians | lost |")
    print("|---|---|---|---|---|---|")
    for rank, loss in run.losses.items():
        print(
            f"| {rank} | {loss.iterations} | {loss.median_s * 1e3:.0f} ms |"
            f" {loss.longest_s * 1e3:.0f} ms | {len(loss.slow)} | {len(loss.discarded)} |"
        )
    print("\n| iterations | all | longer than two medians |\n|---|---|---|")
    for where, found in (("beside renewals", run.beside), ("at other times", run.elsewhere)):
        share = found.slow / max(found.iterations, 1)
        print(f"| {where} | {found.iterations} | {found.slow} ({share:.2%}) |")
    print(f"\nby chance, if renewals cost nothing: {chance(run.beside, run.elsewhere):.2f}")
    print(f"\nequal weights after {run.compared - run.parted} of {run.compared} iterations")
    for warning in run.warnings:
        print(warning)
    sys.exit(0 if within(run) else 1)


def chance(beside: Slowness, elsewhere: Slowness) -> float:
    """Return how likely at least this many long iterations near renewals are, if they are equally
    likely at any time: Fisher's exact test, one-sided.
    """
    table = [[each.slow, each.iterations - each.slow] for each in (beside, elsewhere)]
    return float(fisher_exact(table, alternative="greater").pvalue)


def within(run: RenewedRun) -> bool:
    """Report whether nothing was lost."""
    lost = any(loss.discarded for loss in run.losses.values())
    is_judged = min(run.beside.iterations, run.elsewhere.iterations) > 0
    kept = is_judged and not lost and chance(run.beside, run.elsewhere) >= BY_CHANCE
    return kept and not (run.warnings or run.parted or run.lines_down or run.dropped_messages)


if __name__ == "__main__":
    main()
