"""How much a worker's part in a run can reveal about one of its samples (`trainer.privacy`).

Each use of a sample is one Gaussian mechanism: the sample changes the sum of a batch by `clipNorm`
at most, and the noise is `noiseMultiplier` times as large. Nothing is claimed for chance in which
samples a batch has, because batches are shuffled passes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlion_api.spec.privacy import Privacy
    from dlion_results.summary.tally import WorkerTally


def privacy_spent(
    privacy: Privacy | None, worker: WorkerTally, *, complete: bool
) -> dict[str, Any] | None:
    """Uses of a sample, and ε at the manifest's δ, for `summary.json`; None: no privacy.

    Both are None where no step is known. `complete`: no records were missed; else there may be
    more uses.
    """
    if privacy is None:
        return None
    uses = worker.sample_uses if worker.passes else None
    return {
        "uses": uses,
        "epsilon": None if uses is None else epsilon(privacy, uses),
        "delta": privacy.delta,
        "complete": complete,
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


def max_spent(workers: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The one with the largest ε, of these workers of a summary; None: none is known."""
    known = [each for each in workers if each["privacy"] and each["privacy"]["uses"] is not None]
    return max(known, key=lambda each: each["privacy"]["epsilon"], default=None)


def unknown_privacy(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of those that should account for privacy, and reported no step."""
    accounted = [each for each in workers if each["privacy"]]
    return [each["name"] for each in accounted if each["privacy"]["uses"] is None]


def privacy_sentence(workers: Sequence[Mapping[str, Any]]) -> str:
    """The largest ε of these workers of a summary, and whose is unknown; empty without privacy."""
    texts = []
    if (worst := max_spent(workers)) is not None:
        spent = worst["privacy"]
        sign = "≤" if spent["complete"] else "at least"
        texts.append(
            f"ε {sign} {spent['epsilon']:.3g} at δ = {spent['delta']:g} for a sample, of which"
            f" {worst['name']} made up to {spent['uses']:,} uses"
        )
        if not spent["complete"]:
            texts.append("records of steps are missing")
    if unknown := unknown_privacy(workers):
        others = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        texts.append(f"unknown for {unknown[0]}{others}, without a record of a step")
    return f"Privacy: {'; '.join(texts)}" if texts else ""
