"""Prints the result of a run: a table, or the summary as JSON (docs/results.md)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from dlion_api.status_names import ACCURACY
from dlion_cli.terminal.formatting import (
    format_bytes,
    format_duration,
    format_percent,
    format_rate,
    printable,
)
from dlion_cli.terminal.sent_bytes import links_parts, sent_sentences
from dlion_results.run_folder.stored_values import UNREADABLE
from dlion_results.summary.accuracy_name import accuracy_name, accuracy_text
from dlion_results.summary.privacy import privacy_sentence
from dlion_results.summary.time_use import time_sentences


def print_result(
    console: Console,
    summary: Mapping[str, Any],
    *,
    folder: Path,
    report: Path | None = None,
    output: str = "table",
) -> None:
    """Print the result; with `output="json"` as one JSON object and nothing else."""
    if output == "json":
        document = {**summary, "folder": str(folder), "report": str(report) if report else None}
        console.print(json.dumps(document, indent=2), markup=False, highlight=False, soft_wrap=True)
        return
    if summary["steps"]:
        console.print(result_table(summary, console.width))
    else:  # the rows would be empty
        console.print(Text(_title(summary), style="bold red"), soft_wrap=True)
    for line in _closing_lines(summary, folder, report):
        console.print(Text(line), soft_wrap=True)


def summary_parts(summary: Mapping[str, Any], width: int) -> list[RenderableType]:
    """The tables of a stored summary, what the time went to and what the links carried; or that it
    is damaged."""
    try:
        if not summary["steps"]:  # the rows would be empty
            return [Text(_title(summary), style="bold red")]
        table = result_table(summary, width)
        sentences = [
            *metric_sentences(summary), *_privacy(summary), *time_sentences(summary),
            *sent_sentences(summary),
        ]  # fmt: skip
        parts: list[RenderableType] = [table, *(Text(printable(each)) for each in sentences)]
        return [*parts, *links_parts(summary)]
    except (*UNREADABLE, ArithmeticError, IndexError) as error:
        return [Text(f"The figures of the run are damaged: {error!r:.200}", style="yellow")]


COLUMNS = ("accuracy", "worst class", "steps", "samples", "samples/s", "batch", "sent")
NARROW = {96: "samples", 86: "steps"}
"""Minimum terminal width of optional columns."""
MAX_METRICS_SHOWN = 8
MAX_MISSING_SHOWN = 16


def _title(summary: Mapping[str, Any]) -> str:
    headline, took = _headline(summary["ending"]), format_duration(summary["time_s"])
    return printable(f"{summary['job']['name']}: {headline} after {took}")


def result_table(summary: Mapping[str, Any], width: int) -> Table:
    """One row per replica and one for all of them, at most `width` characters wide."""
    name = accuracy_name(summary)
    style = "bold" if summary["ending"]["succeeded"] else "bold red"
    table = Table(title=Text(_title(summary), style=style))
    table.add_column("replica", no_wrap=True)
    left_out = {column for least, column in NARROW.items() if width < least}
    for column in COLUMNS:
        if column not in left_out:
            title = name if column == ACCURACY else column
            table.add_column(title, justify="right", no_wrap=True)

    def add(replica: str, cells: Mapping[str, str], style: str | None = None) -> None:
        shown = (cells.get(column, "") for column in COLUMNS if column not in left_out)
        table.add_row(replica, *shown, style=style)

    for worker in summary["workers"]:
        add(printable(worker["name"]), _worker_cells(worker, name))
    accuracy = summary["accuracy"]
    table.add_section()
    totals = {
        "accuracy": accuracy_text(accuracy["mean"], name),
        "steps": f"{summary['steps']:,}",
        "samples": f"{summary['samples']:,}",
        "samples/s": format_rate(summary["samples_per_s"]),
        "sent": format_bytes(summary["sent_bytes"]),
    }
    add("all, mean", totals, "bold")
    if accuracy["averaged_model"] is not None and any(
        len(m["ranks"]) > 1 for m in summary["models"]
    ):
        add("averaged model", {"accuracy": accuracy_text(accuracy["averaged_model"], name)}, "bold")
    return table


def _headline(ending: Mapping[str, Any]) -> str:
    """Why the run ended, after the reason if it did not succeed."""
    stop_reason = printable(ending["stop_reason"])
    if ending["succeeded"]:
        return stop_reason
    missing = ", ".join(map(str, ending["missing"][:MAX_MISSING_SHOWN]))
    if (more := len(ending["missing"]) - MAX_MISSING_SHOWN) > 0:
        missing += f" and {more:,} more"
    lacks = f", without the replica{'s' * (len(ending['missing']) > 1)} {missing}"
    return f"{printable(ending['reason'])}: {stop_reason}{lacks if missing else ''}"


def _worker_cells(worker: Mapping[str, Any], name: str) -> dict[str, str]:
    batch = worker["batch_size"]
    classes = [value for value in worker["accuracy"]["classes"] if value is not None]
    one_size = batch["min"] == batch["max"]
    return {
        "accuracy": accuracy_text(worker["accuracy"]["final"], name),
        "worst class": format_percent(min(classes, default=None)),
        "steps": f"{worker['steps']:,}",
        "samples": f"{worker['samples']:,}",
        "samples/s": format_rate(worker["samples_per_s"]),
        "batch": str(batch["last"]) if one_size else f"{batch['min']} to {batch['max']}",
        "sent": format_bytes(worker["sent_bytes"]),
    }


def metric_sentences(summary: Mapping[str, Any]) -> list[str]:
    """The other metrics of `compile()` in one line; none without any."""
    known = summary.get("metrics") or {}
    texts = []
    for name, found in [*known.items()][:MAX_METRICS_SHOWN]:
        mean, least, most = (f"{found[each]:.4g}" for each in ("mean", "min", "max"))
        texts.append(f"{name} {mean}" + (f" ({least} to {most})" if least != most else ""))
    if len(known) > len(texts):
        texts.append(f"{len(known) - len(texts)} more in summary.json")
    return [f"Metrics (mean over replicas): {', '.join(texts)}"] if texts else []


def _privacy(summary: Mapping[str, Any]) -> list[str]:
    sentence = privacy_sentence(summary["workers"])
    return [sentence] if sentence else []


def _closing_lines(summary: Mapping[str, Any], folder: Path, report: Path | None) -> list[str]:
    lines = []
    target = summary["target"]
    if target is not None:
        goal = accuracy_text(target["accuracy"], accuracy_name(summary))
        if target["time_s"] is None:
            lines.append(f"Target of {goal} (mean over replicas): not reached")
        else:
            lines.append(
                f"Target of {goal}: reached after {format_duration(target['time_s'])},"
                f" {target['samples']:,} samples, {format_bytes(target['sent_bytes'])} sent"
            )
    drift = summary["drift"]
    if drift["last"] is not None:
        lines.append(
            f"Drift between replicas: {drift['last']:.3f} in the last of {drift['comparisons']:,} "
            f"comparisons, {drift['max']:.3f} at most"
        )
    lines += map(
        printable,
        [
            *metric_sentences(summary), *_privacy(summary), *time_sentences(summary),
            *sent_sentences(summary),
        ],
    )  # fmt: skip
    reasons = [each["quarantine"] for each in summary["workers"] if each["quarantine"]]
    lines += [f"Quarantined: {printable(reason)}" for reason in reasons]
    if summary["events"]["warnings"]:
        lines.append(f"Warnings: {summary['events']['warnings']} (in events.jsonl)")
    lines += [f"Model ({model['model']}): {folder / model['path']}" for model in summary["models"]]
    lines.append(f"Results: {folder}")
    if report is not None:
        lines.append(f"Report: {report}")
    return lines
