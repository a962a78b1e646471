"""Compare runs of equal seeds: accuracy over sites, in one cluster and alone; speed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from measured import Bar, Measured

SIMULATED = "cluster"
"""The simulated part; parts of a seed are named `<part>-<seed>`."""
NEAR_POINTS, ABOVE_POINTS, MIN_SHARE = 1.5, 4.0, 0.4
MIN_PAIRS = 5
"""Single seeds differ by more than the bar: fewer pairs meet no bar of accuracy."""

TEST_IMAGES = 10_000
"""All test images of CIFAR-10: accuracies on fewer are not compared."""


def pairs(found: Mapping[str, Measured]) -> Iterator[Bar]:
    """Return the bars on several parts: accuracies by seed, and speed."""
    seeds = sorted(int(name.partition("-")[2]) for name in found if name.startswith("train-"))

    def above(part: str) -> list[float]:
        """Return by how many points the job over sites exceeds that part, for each common seed."""
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
                  mean >= -NEAR_POINTS and len(points) >= MIN_PAIRS)  # fmt: skip
    if points := above("alone"):
        mean = sum(points) / len(points)
        yield Bar(f"without exchange at least {ABOVE_POINTS:g} points lower",
                  f"{mean:.1f} points, {_list(points)}",
                  mean >= ABOVE_POINTS and len(points) >= MIN_PAIRS)  # fmt: skip
    shares = [
        found[f"train-{s}"].figures["samples_per_s"] / found[f"alone-{s}"].figures["samples_per_s"]
        for s in seeds if f"alone-{s}" in found
    ]  # fmt: skip
    if shares:
        worst = min(shares)
        words = ", ".join(f"{share:.0%}" for share in shares)
        yield Bar(f"samples/s at least {MIN_SHARE:.0%} of the machines' alone, together",
                  words, worst >= MIN_SHARE)  # fmt: skip


def _list(points: list[float]) -> str:
    words = ", ".join(f"{value:+.1f}" for value in points)
    few = f", {len(points)} of {MIN_PAIRS} pairs" if len(points) < MIN_PAIRS else ""
    return f"seed by seed {words}{few}"
