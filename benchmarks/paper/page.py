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
    speed_up,
)
from published import ADAPTIVE, BASELINES, FORMS, WEIGHTED
from scaling_page import curve_table, write_curve

from dlion_results.comparison import Goal
from dlion_results.report.comparison_picture import write_comparison

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from comparison import Comparison
    from records import Piece

OURS = (ADAPTIVE, FORMS[0])
PUBLISHED = [f"{name}{ending}" for name in BASELINES for ending in ("", WEIGHTED)]
NOT_KNOWN = "-"
SAME = "="
"""As with even batches."""
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
        files = {_file(comparison) for comparison, _ in own.values()}
        parts += ["The job is " + ", ".join(f"`{file}`" for file in files) + ".", ""]
        parts += [f"- {name}: {_facts(*pair, pieces)}." for name, pair in own.items()]
        missing = [place for pair in own.values() for place in _missing(*pair)]
        parts += ["", f"**Not run yet: {', '.join(missing)}.**"] if missing else []
        parts += _tables(part, own)
        parts += ["", *_curve(folder, name_of_all, own)] if part == "two-step" else [""]
        parts += drawn.values()
    path = folder / f"{name_of_all}.md"
    path.write_text("\n".join(parts) + "\n")
    return path


def _drawn(folder: Path, name_of_all: str, piece: Piece, document: Document) -> str:
    """Draw the picture of one environment; return its Markdown."""
    name, place = piece.comparison.name, piece.rows[0].environment
    picture = f"images/{name_of_all}-{name}-{place}.svg"
    goal = Goal(document["targetAccuracy"], document["seconds"])
    write_comparison(piece.rows, goal, folder / picture, title=f"{name}, {place}")
    return f"![{place}]({picture})"


def _curve(folder: Path, name_of_all: str, own: Results) -> list[str]:
    """Draw the scaling curve; return its table and picture in Markdown."""
    picture = f"images/{name_of_all}-two-step.svg"
    write_curve(own, folder / picture)
    return [*curve_table(own), "", f"![speed-up by workers]({picture})"]


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
        f"{comparison.workers} worker{'s' * (comparison.workers > 1)}, "
        f"first batch {comparison.batch}, "
        f"{document['seconds']:g} virtual s, {own[0].seeds} seeds"
        f"{f', rates of {tuned_in}' * bool(tuned_in)}, at {run_at}"
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
        numbers = [one.value for _, one in found if one.value is not None]
        if len(found) > 3 and all(one.met for _, one in found):
            values = f"{min(numbers):.2f} to {max(numbers):.2f}"
        else:
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


def _tables(part: str, own: Results) -> list[str]:
    """Return a table for each figure, with a column for each environment; of one a single table.

    A row with weighted batches is left out where it equals that with even ones everywhere.
    """
    documents = [document for _, document in own.values()]
    whole = {**documents[0], "rows": [row for each in documents for row in each["rows"]]}
    cells = {
        (row["environment"], row["variant"]): _cells(comparison, row)
        for comparison, document in own.values()
        for row in document["rows"]
    }
    places = environments(whole)
    names = dict.fromkeys(name for _, name in cells)
    heads = [f"s to {whole['targetAccuracy']:.0%}, MB", "accuracy, %", *_MORE.get(part, ())]
    if len(places) == 1:
        rows = {name: cells[places[0], name] for name in names}
        return _table([places[0], *heads], rows)
    lines = list[str]()
    for at, head in enumerate(heads):
        rows = {name: [_beside(cells, place, name, at) for place in places] for name in names}
        if at == 0 and FORMS[1] in names:
            for name in OURS:
                ratios = (speed_up(whole, place, name, PUBLISHED) for place in places)
                rows[f"{name}: times the best published"] = [_ratio(each) for each in ratios]
        rows = {name: row for name, row in rows.items() if set(row) != {SAME}}
        lines += _table([head, *places], rows)
    return lines


def _table(heads: Sequence[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    lines = ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return [*lines, *(f"| {' | '.join([name, *row])} |" for name, row in rows.items())]


def _beside(cells: Mapping[tuple[str, str], list[str]], place: str, name: str, at: int) -> str:
    """Return one cell of that row, or that it equals the one with even batches."""
    own = cells.get((place, name))
    if name.endswith(WEIGHTED) and own == cells.get((place, name.removesuffix(WEIGHTED))):
        return SAME
    return own[at] if own else NOT_KNOWN


def _cells(comparison: Comparison, row: Document) -> list[str]:
    sent = row["bytes_to_target"]["median"]
    time = _spread(row["time_to_target_s"], 1, "{:.0f}")
    figures = [
        f"{time}, {_megabytes(sent)}" if sent else time,
        _spread(row["accuracy"], 100, "{:.1f}"),
    ]
    if comparison.part == "adacomp":
        figures.append(_received(row))
    if comparison.part == "selective":
        value = bytes_per_worker(row, comparison)
        figures.append(NOT_KNOWN if value is None else f"{value / 1e6:.2f}")
    return figures


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
