"""The results as a page in Markdown, with a picture for each comparison and environment.

Judged by `bars`, drawn as `dlion compare` draws. Runs nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bars import (
    Document,
    Results,
    Verdict,
    bytes_per_worker,
    environments,
    median,
    points,
    row_of,
    speed_up,
)
from published import ADAPTIVE, BASELINES, FORMS, WEIGHTED, Comparison

from dlion_results.comparison import Goal
from dlion_results.report.comparison_picture import write_comparison

if TYPE_CHECKING:
    from collections.abc import Sequence

    from records import Piece

OURS = (ADAPTIVE, *FORMS)
NOT_KNOWN = "-"
TO = "\N{EN DASH}"
NAME = "paper"


def write_page(
    folder: Path,
    pieces: Sequence[Piece],
    results: Results,
    judged: Sequence[Verdict],
    head: str,
    *,
    edition: str = "",
) -> Path:
    """Writes the page and its pictures into the folder; where the page is.

    `edition` is part of their names and of the title.
    """
    (folder / "images").mkdir(parents=True, exist_ok=True)
    name_of_all = f"{NAME}-{edition}" if edition else NAME
    title = "# The published evaluations" + (f", {edition} edition" if edition else "")
    parts = [title, "", head, ""]
    parts += _bars(judged)
    for name, (comparison, document) in results.items():
        own = [piece for piece in pieces if piece.comparison.name == name]
        parts += ["", f"## {name}", "", _facts(comparison, document)]
        if missing := _missing(comparison, document):
            parts += ["", f"**Not run yet: {', '.join(missing)}.**"]
        for piece in own:
            place = piece.rows[0].environment
            picture = f"images/{name_of_all}-{name}-{place}.svg"
            goal = Goal(document["targetAccuracy"], document["seconds"])
            write_comparison(piece.rows, goal, folder / picture, title=f"{name}, {place}")
            if len(own) > 1:
                parts += ["", f"### {name} in {place}"]
            parts += ["", f"Run at {piece.commit}, {piece.seeds} seeds.", ""]
            parts += _tables(comparison, document, place)
            parts += ["", f"![accuracy, and time to the target]({picture})"]
    path = folder / f"{name_of_all}.md"
    path.write_text("\n".join(parts) + "\n")
    return path


def _missing(comparison: Comparison, document: Document) -> list[str]:
    there = environments(document)
    return [name for place in comparison.environments if (name := Path(place).stem) not in there]


def _facts(comparison: Comparison, document: Document) -> str:
    file = comparison.file.resolve().relative_to(Path(__file__).resolve().parents[2])
    tuned_in = Path(comparison.tuned_in).stem if comparison.tuned_in else "each environment"
    return (
        f"`{file}`, {comparison.workers} workers, batch {comparison.batch} at the start, "
        f"{document['seconds']:g} virtual seconds, target {document['targetAccuracy']:.0%}. "
        f"Rates chosen in {tuned_in}."
    )


def _bars(judged: Sequence[Verdict]) -> list[str]:
    lines = ["| part | what | bar | measured | |", "|---|---|---|---|---|"]
    last = ""
    for one in judged:
        part, last = "" if one.part == last else one.part, one.part
        value = NOT_KNOWN if one.value is None else f"{one.value:.2f}"
        word = one.why or {None: "", True: "met", False: "**missed**"}[one.met]
        value = f"over {value}" if one.at_least else value
        lines.append(f"| {part} | {one.what} | {one.bar} | {value} | {word} |")
    return lines


def _tables(comparison: Comparison, document: Document, environment: str) -> list[str]:
    rows = [row for row in document["rows"] if row["environment"] == environment]
    lines = _table(comparison, document, rows, title=environment)
    if not comparison.columns.keys().isdisjoint(FORMS[1:]):
        ours = (_over_best(document, environment, name) for name in OURS)
        lines += ["", "Speed and points over the best published system: " + "; ".join(ours) + "."]
    return lines


def _over_best(document: Document, environment: str, name: str) -> str:
    """What one of ours is over whichever of the others is best, in time and in accuracy."""
    others = [f"{other}{ending}" for other in BASELINES for ending in ("", WEIGHTED)]
    accuracies = {
        other: value
        for other in others
        if (value := median(row_of(document, environment, other), "accuracy")) is not None
    }
    text = f"{name} {_ratio(speed_up(document, environment, name, others))} times"
    if accuracies:
        best = max(accuracies, key=accuracies.__getitem__)
        text += f", {_above(document, environment, name, best)}"
    return text


def _table(
    comparison: Comparison,
    document: Document,
    rows: Sequence[Document],
    *,
    title: str,
) -> list[str]:
    target = f"s to {document['targetAccuracy']:.0%}"
    heads = [title, "rate", target, "MB to it", "accuracy, %"]
    if comparison.part == "adacomp":
        heads.append("MB into the server")
    if comparison.part == "selective":
        heads.append("MB of a worker in an iteration")
    lines = [[row["variant"], f"{row['learningRate']:g}", *_cells(row)] for row in rows]
    for line, row in zip(lines, rows, strict=True):
        if comparison.part == "adacomp":
            line.append(_received(row))
        if comparison.part == "selective":
            value = bytes_per_worker(row, comparison)
            line.append(NOT_KNOWN if value is None else f"{value / 1e6:.2f}")
    head, *rest = (f"| {' | '.join(line)} |" for line in (heads, *lines))
    return [head, "|---" * len(heads) + "|", *rest]


def _cells(row: Document) -> list[str]:
    return [
        _spread(row["time_to_target_s"], 1, "{:.0f}"),
        _spread(row["bytes_to_target"], 1e-6, "{:.3g}"),
        _spread(row["accuracy"], 100, "{:.1f}"),
    ]


def _spread(spread: dict[str, Any], factor: float, form: str) -> str:
    """Median, and in brackets the range and how many seeds have no value."""
    if spread["least"] is None:
        return NOT_KNOWN
    low, high = (form.format(spread[end] * factor) for end in ("least", "most"))
    middle = NOT_KNOWN if spread["median"] is None else form.format(spread["median"] * factor)
    never = f", {spread['missing']} never" if spread["missing"] else ""
    return middle if low == high and not never else f"{middle} ({low}{TO}{high}{never})"


def _received(row: Document) -> str:
    values = [run["received_bytes"][0] / 1e6 for run in row["runs"] if run["received_bytes"]]
    return f"{min(values):.1f}{TO}{max(values):.1f}" if values else NOT_KNOWN


def _ratio(ratio: tuple[float, bool] | None) -> str:
    if ratio is None:
        return NOT_KNOWN
    value, is_bound = ratio
    return f"over {value:.2f}" if is_bound else f"{value:.2f}"


def _above(document: Document, environment: str, name: str, other: str) -> str:
    above = points(document, environment, name, other)
    its = median(row_of(document, environment, other), "accuracy")
    return NOT_KNOWN if above is None or not its else f"{above:+.1f} ({above / 100 / its:+.1%})"
