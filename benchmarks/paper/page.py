"""Write the results as a page in Markdown, with a picture for each comparison and environment.

`bars` judges them; pictures are drawn as by `dlion compare`. This module runs nothing.
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
_MORE = {"adacomp": ("MB into the server",), "selective": ("MB of a worker in an iteration",)}
"""Columns of parts on bytes."""


def write_page(
    folder: Path,
    pieces: Sequence[Piece],
    results: Results,
    judged: Sequence[Verdict],
    head: str,
    *,
    edition: str = "",
) -> Path:
    """Write the page and its pictures into the folder; return its path.

    `edition` is part of their names and of the title.
    """
    (folder / "images").mkdir(parents=True, exist_ok=True)
    name_of_all = f"{NAME}-{edition}" if edition else NAME
    title = "# The published evaluations" + (f", {edition} edition" if edition else "")
    parts = [title, "", head, "", *_bars(judged)]
    for part in dict.fromkeys(comparison.part for comparison, _ in results.values()):
        parts += ["", f"## {part}", ""]
        own = {name: pair for name, pair in results.items() if pair[0].part == part}
        drawn = {
            (name, piece.rows[0].environment): _drawn(folder, name_of_all, piece, document)
            for name, (_, document) in own.items()
            for piece in pieces
            if piece.comparison.name == name
        }
        if len(own) > 1:
            parts += [*_together(own, pieces), "", *drawn.values()]
            continue
        ((name, (comparison, document)),) = own.items()
        parts.append(f"`{_file(comparison)}`, {_facts(comparison, document, pieces)}")
        if missing := _missing(comparison, document):
            parts += ["", f"**Not run yet: {', '.join(missing)}.**"]
        for (_, place), picture in drawn.items():
            parts += ["", f"### {name} in {place}"] if len(drawn) > 1 else []
            parts += ["", *_tables(comparison, document, place), "", picture]
    path = folder / f"{name_of_all}.md"
    path.write_text("\n".join(parts) + "\n")
    return path


def _drawn(folder: Path, name_of_all: str, piece: Piece, document: Document) -> str:
    """Draw the picture of one environment; return its Markdown."""
    name, place = piece.comparison.name, piece.rows[0].environment
    picture = f"images/{name_of_all}-{name}-{place}.svg"
    goal = Goal(document["targetAccuracy"], document["seconds"])
    write_comparison(piece.rows, goal, folder / picture, title=f"{name}, {place}")
    return f"![accuracy over time]({picture})"


def _together(own: Results, pieces: Sequence[Piece]) -> list[str]:
    """Return the comparisons of one part, which have the same columns, in one table."""
    facts, table = list[str](), list[str]()
    for name, (comparison, document) in own.items():
        facts.append(f"- {name}: {_facts(comparison, document, pieces)}")
        for place in environments(document):
            rows = [row for row in document["rows"] if row["environment"] == place]
            lines = _table(comparison, document, rows, title="column", place=f"{place}: ")
            table += lines[2:] if table else lines
    (file,) = {_file(comparison) for comparison, _ in own.values()}
    return [f"The job is `{file}`.", "", *facts, "", *table]


def _missing(comparison: Comparison, document: Document) -> list[str]:
    there = environments(document)
    return [name for place in comparison.environments if (name := Path(place).stem) not in there]


def _file(comparison: Comparison) -> Path:
    return comparison.file.resolve().relative_to(Path(__file__).resolve().parents[2])


def _facts(comparison: Comparison, document: Document, pieces: Sequence[Piece]) -> str:
    tuned_in = Path(comparison.tuned_in).stem
    own = [piece for piece in pieces if piece.comparison.name == comparison.name]
    commits = {
        piece.rows[0].environment: piece.commit[:8] + "+" * piece.commit.endswith("+")
        for piece in own
    }
    if len(set(commits.values())) > 1:
        run_at = ", ".join(f"{commit} ({place})" for place, commit in commits.items())
    else:
        run_at = next(iter(commits.values()))
    return (
        f"{comparison.workers} workers, batch {comparison.batch} at the start, "
        f"{document['seconds']:g} virtual seconds, {own[0].seeds} seeds"
        f"{f', rates of {tuned_in}' * bool(tuned_in)}. Run at {run_at}."
    )


def _bars(judged: Sequence[Verdict]) -> list[str]:
    """Return a row for each bar, with the measured value in each environment."""
    rows: dict[tuple[str, str, str], list[tuple[str, Verdict]]] = {}
    for one in judged:
        place, _, what = one.what.rpartition(": ")
        rows.setdefault((one.part, what, one.bar), []).append((place, one))
    lines = ["| part | what | bar | measured | |", "|---|---|---|---|---|"]
    last = ""
    for (part, what, bar), found in rows.items():
        values = ", ".join(f"{place} {_value(one)}".strip() for place, one in found)
        missed = sum(one.met is False for _, one in found)
        words = {one.why or {None: "", True: "met", False: "**missed**"}[one.met]
                 for _, one in found}  # fmt: skip
        word = words.pop() if len(words) == 1 else f"{missed} of {len(found)} **missed**"
        lines.append(f"| {part if part != last else ''} | {what} | {bar} | {values} | {word} |")
        last = part
    return lines


def _value(one: Verdict) -> str:
    if one.value is None:
        return NOT_KNOWN
    text = f"{'over ' * one.at_least}{one.value:.2f}"
    return f"**{text}**" if one.met is False else text


def _tables(comparison: Comparison, document: Document, environment: str) -> list[str]:
    rows = [row for row in document["rows"] if row["environment"] == environment]
    lines = _table(comparison, document, rows, title=environment)
    if not comparison.columns.keys().isdisjoint(FORMS[1:]):
        ours = (_over_best(document, environment, name) for name in OURS)
        lines += ["", "Speed and points over the best published system: " + "; ".join(ours) + "."]
    return lines


def _over_best(document: Document, environment: str, name: str) -> str:
    """Return the ratio of a policy to the best published system, in time and in accuracy."""
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
    place: str = "",
) -> list[str]:
    """Return a table in which equal columns for even and weighted batches share a row.

    Columns that never reach the target are in a sentence, unless rows begin with their place.
    """
    target = f"s to {document['targetAccuracy']:.0%}"
    heads = [f"{title} (rate)", target, "MB to it", "accuracy, %", *_MORE.get(comparison.part, ())]
    lines, never = list[str](), list[str]()
    cells = {row["variant"]: [f"({row['learningRate']:g})", *_cells(row)] for row in rows}
    for row in rows:
        name, own = row["variant"], cells[row["variant"]]
        if name.endswith(WEIGHTED) and own == cells.get(name.removesuffix(WEIGHTED)):
            continue
        rate, *figures = own
        label = f"{place}{name}{', both' * (own == cells.get(f'{name}{WEIGHTED}'))} {rate}"
        if comparison.part == "adacomp":
            figures.append(_received(row))
        if comparison.part == "selective":
            value = bytes_per_worker(row, comparison)
            figures.append(NOT_KNOWN if value is None else f"{value / 1e6:.2f}")
        if row["time_to_target_s"]["least"] is None and not place:
            never.append(f"{label} {figures[-1].partition(' ')[0]}")
        else:
            lines.append(f"| {' | '.join([label, *figures])} |")
    table = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *lines]
    words = "No seed of these reaches the target (median accuracy)"
    return [*table, "", f"{words}: {', '.join(never)}."] if never else table


def _cells(row: Document) -> list[str]:
    sent = row["bytes_to_target"]["median"]
    return [
        _spread(row["time_to_target_s"], 1, "{:.0f}"),
        NOT_KNOWN if sent is None else _megabytes(sent),
        _spread(row["accuracy"], 100, "{:.1f}"),
    ]


def _megabytes(count: float) -> str:
    value = count / 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _spread(spread: dict[str, Any], factor: float, form: str) -> str:
    """Return the median, and in brackets the range and the number of seeds without a value."""
    if spread["least"] is None:
        return NOT_KNOWN
    low, high = (form.format(spread[end] * factor) for end in ("least", "most"))
    middle = NOT_KNOWN if spread["median"] is None else form.format(spread["median"] * factor)
    never = f", {spread['missing']} never" if spread["missing"] else ""
    return middle if low == high and not never else f"{middle} ({low}{TO}{high}{never})"


def _received(row: Document) -> str:
    values = [run["received_bytes"][0] for run in row["runs"] if run["received_bytes"]]
    if not values:
        return NOT_KNOWN
    return TO.join(dict.fromkeys(map(_megabytes, (min(values), max(values)))))


def _ratio(ratio: tuple[float, bool] | None) -> str:
    if ratio is None:
        return NOT_KNOWN
    value, is_bound = ratio
    return f"over {value:.2f}" if is_bound else f"{value:.2f}"


def _above(document: Document, environment: str, name: str, other: str) -> str:
    above = points(document, environment, name, other)
    return NOT_KNOWN if above is None else f"{above:+.1f}"
