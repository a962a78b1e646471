"""What runs of a seed say together: accuracy over sites, in one cluster, and alone; speed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from measured import Bar, Measured

SIMULATED = "cluster"
"""The part that is simulated; parts of a seed are called `<part>-<seed>`."""
NEAR_POINTS, ABOVE_POINTS, LEAST_SHARE = 1.5, 4.0, 0.4
LEAST_PAIRS = 5
"""Single seeds differ by more than what is asked: fewer pairs meet no bar of accuracy."""

TEST_IMAGES = 10_000
"""All of CIFAR-10's: an accuracy on fewer is held against nothing."""


def pairs(found: Mapping[str, Measured]) -> Iterator[Bar]:
    """What several parts say together: accuracies by seed, and speed."""
    seeds = sorted(int(name.partition("-")[2]) for name in found if name.startswith("train-"))

    def above(part: str) -> list[float]:
        """By how many points the job over sites is above that part, for each seed of both."""
        return [
            100 * (found[f"train-{seed}"].figures["accuracy"]
                   - found[f"{part}-{seed}"].figures["accuracy"])
            for seed in seeds
            if f"{part}-{seed}" in found
            and all(found[f"{each}-{seed}"].figures["evaluated_samples"] == TEST_IMAGES
                    for each in ("train", part))
        ]  # fmt: skip

    if points := above(SIMULATED):
        mean = sum(points) / len(points)
        yield Bar(f"accuracy within {NEAR_POINTS:g} points of the same job in one cluster",
                  f"{mean:+.1f} points, {_list(points)}",
                  mean >= -NEAR_POINTS and len(points) >= LEAST_PAIRS)  # fmt: skip
    if points := above("alone"):
        mean = sum(points) / len(points)
        yield Bar(f"without exchange at least {ABOVE_POINTS:g} points lower",
                  f"{mean:.1f} points, {_list(points)}",
                  mean >= ABOVE_POINTS and len(points) >= LEAST_PAIRS)  # fmt: skip
    shares = [
        found[f"train-{s}"].figures["samples_per_s"] / found[f"alone-{s}"].figures["samples_per_s"]
        for s in seeds if f"alone-{s}" in found
    ]  # fmt: skip
    if shares:
        worst = min(shares)
        words = ", ".join(f"{share:.0%}" for share in shares)
        yield Bar(f"samples/s at least {LEAST_SHARE:.0%} of the machines' alone, together",
                  words, worst >= LEAST_SHARE)  # fmt: skip


def _list(points: list[float]) -> str:
    words = ", ".join(f"{value:+.1f}" for value in points)
    few = f", {len(points)} of {LEAST_PAIRS} pairs" if len(points) < LEAST_PAIRS else ""
    return f"seed by seed {words}{few}"
