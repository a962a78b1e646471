"""How much a worker's part in a run can reveal about one of its samples (`trainer.privacy`).

Each use of a sample is one Gaussian mechanism: the sample changes the sum of a batch by `clipNorm`
at most, and the noise is `noiseMultiplier` times as large. Nothing is claimed for chance in which
samples a batch has, because batches are shuffled passes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlion_api.spec.privacy import Privacy
    from dlion_results.summary.tally import WorkerTally


def privacy_spent(privacy: Privacy | None, worker: WorkerTally) -> dict[str, Any] | None:
    """Uses of a sample, and ε at the manifest's δ, for `summary.json`; None: no privacy."""
    if privacy is None:
        return None
    return {
        "uses": worker.sample_uses,
        "epsilon": epsilon(privacy, worker.sample_uses),
        "delta": privacy.delta,
    }


def epsilon(privacy: Privacy, uses: int) -> float:
    """The ε of that many uses of one sample, exact but for rounding.

    The uses together are one Gaussian mechanism with noise smaller by the root of their number
    (Dong, Roth, Su 2022, corollary 3.3).
    """
    # Only reports of private runs need it, and SciPy takes a second to import.
    from dp_accounting import get_epsilon_gaussian

    if not uses:
        return 0.0
    return float(get_epsilon_gaussian(privacy.noise_multiplier / math.sqrt(uses), privacy.delta))


def privacy_sentence(workers: list[dict[str, Any]]) -> str:
    """The largest ε of these workers of a summary; empty without privacy."""
    known = [each for each in workers if each.get("privacy")]
    if not known:
        return ""
    worst = max(known, key=lambda each: each["privacy"]["epsilon"])
    spent = worst["privacy"]
    return (
        f"Privacy: ε ≤ {spent['epsilon']:.3g} at δ = {spent['delta']:g} for a sample, of which"
        f" {worst['name']} made up to {spent['uses']:,} uses"
    )
