"""The bars for the figures of the parts, and whether they are met.

The input is the output of `dlion compare` (`comparison.json`), by name of the comparison. Every
ratio is one of medians over seeds. Nothing is judged without figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from comparison import Comparison
from comparison import environment as file_of_environment
from published import ADAPTIVE, BASELINES, FORMS, TWO_STEP

from dlion_environments.loading import load_environment

OF_IDEAL: Mapping[str, float] = {
    **dict.fromkeys(("hetero-sys-a", "hetero-sys-b", "dynamic-sys-a"), 0.7),
    **dict.fromkeys(("two-clouds", "two-clouds-hetero"), 0.6),
    **dict.fromkeys(("three-low-one-high", "intercontinental"), 0.6),
}
"""Minimum share of the ideal's speed for `adaptive`."""
MAX_SAMPLES = 1.3
"""Maximum ratio of samples to the target, `adaptive` over the ideal's exact mean."""

RING = "ring all-reduce"
MIN_SCALABILITY = 0.7
"""Minimum speed-up of `twostep` over one worker, divided by the workers (the slides' X / Y)."""

Document = Mapping[str, Any]
Results = Mapping[str, tuple[Comparison, Document]]


@dataclass(frozen=True)
class Verdict:
    """One bar; `value` None: its runs are missing or have no result."""

    part: str
    what: str
    bar: str
    value: float | None
    met: bool | None
    at_least: bool = False
    """The value is a lower bound: the other side never reached the target."""
    why: str = ""
    """The bar is not judged."""


def verdicts(results: Results) -> list[Verdict]:
    """Return the bars of all parts that ran, in the order of the page."""
    judges = {
        "systems": _systems, "slides": _adaptive, "recent": _adaptive, "recent-slides": _adaptive,
        "served": _adaptive, "served-slides": _adaptive,
        "techniques": _techniques, "adacomp": _adacomp,
        "fedat": _fedat, "delays": _delays, "selective": _selective, "two-step": _two_step,
        "wrong-labels": _wrong_labels,
    }  # fmt: skip
    found: list[Verdict] = []
    for part, judge in judges.items():
        own = {name: pair for name, pair in results.items() if pair[0].part == part}
        if own:
            found += judge(own)
    return found


def row_of(document: Document, environment: str, variant: str) -> Document | None:
    """Return its row, if it ran."""
    rows = document["rows"]
    return next(
        (r for r in rows if (r["environment"], r["variant"]) == (environment, variant)), None
    )


def median(row: Document | None, figure: str) -> float | None:
    """Return the median over seeds; None if more than half have no value."""
    return None if row is None else row[figure]["median"]


def environments(document: Document) -> list[str]:
    """Return the environments in the order of their first mention."""
    return list(dict.fromkeys(row["environment"] for row in document["rows"]))


def speed_up(document: Document, environment: str, form: str, others: Iterable[str]) -> _Ratio:
    """Return how many times sooner `form` reaches the target than the soonest of the others."""
    own = median(row_of(document, environment, form), "time_to_target_s")
    rows = [row_of(document, environment, other) for other in others]
    if not own or not rows or None in rows:
        return None
    times = [time for row in rows if (time := median(row, "time_to_target_s")) is not None]
    return (min(times) / own, False) if times else (document["seconds"] / own, True)


_Ratio = tuple[float, bool] | None


def points(document: Document, environment: str, variant: str, other: str) -> float | None:
    """Return the final accuracy above the other's in percentage points, as exact as recorded.

    A bar of one point is not missed by the binary rounding of 0.5227 - 0.5327.
    """
    own = median(row_of(document, environment, variant), "accuracy")
    its = median(row_of(document, environment, other), "accuracy")
    return None if own is None or its is None else round(100 * (own - its), 4)


def _at_least(
    part: str, what: str, value: float | None, least: float, form: str = "{:g}"
) -> Verdict:
    met = None if value is None else value >= least
    return Verdict(part, what, "≥ " + form.format(least), value, met)


def _systems(results: Results) -> Iterator[Verdict]:
    """Return the published bars: the maximum speed-up in any environment, over the best and each.

    A value below the bar is judged once all environments ran.
    """
    ((comparison, document),) = results.values()
    there, of = len(environments(document)), len(comparison.environments)
    for others, name in ((BASELINES, "the best"), *(((one,), one) for one in BASELINES)):
        what = f"largest speed-up of dlion, either form, over {name}"
        ratios = [
            ratio
            for environment in environments(document)
            for form in FORMS
            if (ratio := speed_up(document, environment, form, others)) is not None
        ]
        value, bound = max(ratios, default=(None, False))
        met = None if value is None else value >= 2
        if met is False and there < of:
            yield Verdict("systems", what, "≥ 2", value, None, bound, f"{there} of {of} places")
        else:
            yield Verdict("systems", what, "≥ 2", value, met, bound)
    yield from _adaptive(results)


def _adaptive(results: Results) -> Iterator[Verdict]:
    """Compare `adaptive` with the ideal, and with the soonest of all other systems, ours too."""
    ((comparison, document),) = results.values()
    for environment in environments(document):
        row = row_of(document, environment, ADAPTIVE)
        never = row is not None and median(row, "time_to_target_s") is None
        others = [name for name in comparison.columns if name != ADAPTIVE]
        for rivals, what, least in (
            (
                ("ideal",),
                "adaptive, part of the ideal's speed",
                OF_IDEAL.get(environment) if comparison.with_ideal else None,
            ),
            (others, "adaptive over the soonest of all others", 1.0),
        ):
            if least is None:
                continue
            value, bound = speed_up(document, environment, ADAPTIVE, rivals) or (None, False)
            met = False if never else None if value is None else value >= least
            what = f"{environment}: {what}"
            yield Verdict(comparison.part, what, f"≥ {least:g}", value, met, bound)
        own, ideal = (
            median(row_of(document, environment, name), "samples_to_target")
            for name in (ADAPTIVE, "ideal")
        )
        if own and ideal:
            what = f"{environment}: adaptive, samples to the target over the ideal's"
            met = own / ideal <= MAX_SAMPLES
            yield Verdict(comparison.part, what, f"≤ {MAX_SAMPLES:g}", own / ideal, met)


def _techniques(results: Results) -> Iterator[Verdict]:
    if "growing-batch" not in results:
        return
    _, document = results["growing-batch"]
    (place,) = environments(document)
    for column, other, where in (
        ("dlion", "without growing batch", "with the other techniques"),
        ("growing batch alone", "none of the four", "alone"),
    ):
        value = points(document, place, column, other)
        yield _at_least("techniques", f"growing over fixed batch, points, {where}", value, -1)


def _adacomp(results: Results) -> Iterator[Verdict]:
    """Compare bytes into the server for each sample, if accuracy is within half a point."""
    for _, document in results.values():
        for place in environments(document):
            plain = _into_server(row_of(document, place, "async"))
            for column, least in (("adacomp float32", 50), ("adacomp float16, coded", 100)):
                own = _into_server(row_of(document, place, column))
                ratio = plain / own if plain and own else None
                yield _at_least("adacomp", f"{place}: async / {column}, bytes in", ratio, least)
                lost = points(document, place, column, "async")
                yield _at_least("adacomp", f"{place}: {column} over async, points", lost, -0.5)


def _into_server(row: Document | None) -> float | None:
    """Return bytes into worker 0 for each trained sample; the median over seeds with a value."""
    runs = [] if row is None else [r for r in row["runs"] if r["samples"] and r["received_bytes"]]
    values = sorted(run["received_bytes"][0] / run["samples"] for run in runs)
    return values[(len(values) - 1) // 2] if values else None


def _fedat(results: Results) -> Iterator[Verdict]:
    (_, document), *_ = results.values()
    (place,) = environments(document)
    rows = {row["variant"]: row for row in document["rows"]}
    own = median(rows.get("fedat d=3"), "bytes_to_target")
    for other, bar in (("fedat uncoded", 2.0), ("synchronous averaging", 2.0)):
        its = median(rows.get(other), "bytes_to_target")
        ratio = its / own if own and its else None
        yield _at_least("fedat", f"{other} / fedat d=3, bytes to the target", ratio, bar)
    for other in ("synchronous averaging", "async"):
        value = points(document, place, "fedat d=3", other)
        yield Verdict("fedat", f"fedat d=3 over {other}, points", "none", value, None)


def _delays(results: Results) -> Iterator[Verdict]:
    for name, (_, document) in results.items():
        (place,) = environments(document)
        value = points(document, place, "compensated 0.04", "plain")
        yield _at_least("delays", f"{name}: compensated over plain, points", value, 0)


def _selective(results: Results) -> Iterator[Verdict]:
    sent: list[float] = []
    for name, (comparison, document) in results.items():
        (place,) = environments(document)
        value = bytes_per_worker(row_of(document, place, "selective"), comparison)
        sent += [] if value is None else [value]
        over = points(document, place, "selective", "all")
        yield _at_least("selective", f"{name}: selective over all, points", over, -1)
    spread = max(sent) / min(sent) if len(sent) == len(results) > 1 and min(sent) else None
    met = None if spread is None else spread <= 1.3
    what = "bytes of a worker in an iteration, most / least"
    yield Verdict("selective", what, "≤ 1.3", spread, met)


def bytes_per_worker(row: Document | None, comparison: Comparison) -> float | None:
    """Return the bytes of one worker in one iteration of a fixed global batch."""
    sent, samples = median(row, "sent_bytes"), median(row, "samples")
    if sent is None or not samples:
        return None
    return sent / comparison.workers / (samples / comparison.batch)


def _two_step(results: Results) -> Iterator[Verdict]:
    """Compare the scaling of `twostep` with its workers, and with exchanges of whole gradients."""
    times = times_by_workers(results)
    curve = scaling_curve(times)[TWO_STEP]
    for comparison, document in results.values():
        (place,) = environments(document)
        n = comparison.workers
        if n == 1:
            continue
        own_s, ring_s = times[TWO_STEP][n], times[RING][n]
        scale = (value / n, False) if (value := curve[n]) else None
        over_ring = (ring_s / own_s, False) if ring_s and own_s else None
        over_full = speed_up(document, place, TWO_STEP, ("full",))
        for what, found, least in (
            ("twostep, speed-up over one worker / workers", scale, MIN_SCALABILITY),
            (f"twostep over {RING}", over_ring, 1.0),
            ("twostep over full", over_full, 1.0),
        ):
            value, bound = found or (None, False)
            met = False if own_s is None else None if value is None else value >= least
            yield Verdict("two-step", f"{place}: {what}", f"≥ {least:g}", value, met, bound)


def times_by_workers(results: Results) -> dict[str, dict[int, float | None]]:
    """Return the median time to the target of each column, and of a ring all-reduce, by workers."""
    times = dict[str, dict[int, float | None]]()
    for comparison, document in results.values():
        for row in document["rows"]:
            reached_s = median(row, "time_to_target_s")
            times.setdefault(row["variant"], {})[comparison.workers] = reached_s
        ring_s = _ring_s(comparison, document)
        times.setdefault(RING, {})[comparison.workers] = ring_s
    return times


def scaling_curve(
    times: Mapping[str, Mapping[int, float | None]],
) -> dict[str, dict[int, float | None]]:
    """Return for each column and number of workers the speed-up over its own single worker."""
    return {
        name: {
            n: alone / own if (alone := by_n.get(1)) and own else None for n, own in by_n.items()
        }
        for name, by_n in times.items()
    }


def _ring_s(comparison: Comparison, document: Document) -> float | None:
    """Return the time to the target if a ring all-reduce made the ideal's exact means.

    Each iteration takes its compute time and 2 (n - 1) transfers of 1 / n of a gradient, each of
    latency + bytes / bandwidth. A gradient has the bytes that `full` sends to a peer.
    """
    (place,) = environments(document)
    ideal_s = median(row_of(document, place, "ideal"), "time_to_target_s")
    full = row_of(document, place, "full")
    sent, samples = median(full, "sent_bytes"), median(full, "samples")
    n = comparison.workers
    if ideal_s is None or n == 1:
        return ideal_s
    if not sent or not samples:
        return None
    made = load_environment(file_of_environment(comparison.environments[0]))
    (machine,), reach = made.workers, made.inside_sites
    assert machine.mbit_per_s is not None
    assert reach is not None
    gradient_bytes = sent / (samples / comparison.batch) / (n * (n - 1))
    chunk_s = reach.latency_ms / 1000 + gradient_bytes / n * 8 / (machine.mbit_per_s * 1e6)
    compute_s = comparison.batch / (n * machine.cores * made.samples_per_s_per_core)
    return ideal_s * (1 + 2 * (n - 1) * chunk_s / compute_s)


def _wrong_labels(results: Results) -> Iterator[Verdict]:
    (_, document), *_ = results.values()
    (place,) = environments(document)
    lost = {
        kind: points(document, place, f"{kind}, right", f"{kind}, wrong")
        for kind in ("mean", "median")
    }
    known = [value for value in lost.values() if value is not None]
    saved = known[0] - known[1] if len(known) == 2 else None
    yield _at_least("wrong-labels", "points that the median loses less than the mean", saved, 2)
