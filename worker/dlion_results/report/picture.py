"""Combines the first charts of the report into one SVG file.

`dlion report --picture` calls `write_picture`. The file is self-contained and follows the reader's
light or dark theme, so that it can be part of a README.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from markupsafe import Markup, escape

from dlion_results.report import progress_charts, resource_charts
from dlion_results.report.drawing import Chart, colour, page_colour
from dlion_results.report.palette import DARK, LIGHT, css_colours
from dlion_results.report.runs import LoadedRun, load_runs
from dlion_results.run_folder.storage import write_whole
from dlion_results.run_folder.stored_values import text_of

_WIDTH, _MARGIN, _GAP = 1000.0, 20.0, 16.0
_HEAD, _LEGEND_LINE, _CAPTION = 46.0, 22.0, 24.0
_LEGEND_COLUMN = 160.0
_BYTES = 400_000
"""A larger picture slows down the page that includes it."""

_VIEW_BOX = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')
_STYLE = f"""
svg {{ --font: ui-sans-serif, system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  --paper: #ffffff; --ink: #1c2330; --faint: #697386; --grid: #e6e9ef;
  {css_colours(LIGHT)} }}
@media (prefers-color-scheme: dark) {{
  svg {{ --paper: #181e28; --ink: #e4e9f1; --faint: #97a2b4; --grid: #2a3240;
    {css_colours(DARK)} }}
}}
.paper {{ fill: var(--paper); stroke: var(--grid); }}
.words {{ font-family: var(--font); fill: var(--ink); font-size: 13px; }}
.title {{ font-size: 19px; font-weight: 600; }}
.name {{ font-size: 14px; font-weight: 600; }}
"""


def write_picture(
    folders: Sequence[Path], out: Path, *, labels: Sequence[str] = (), title: str = ""
) -> Path:
    """Write the picture of these result folders to `out` and return it.

    Raises: DataError if a folder holds no run; StorageError if `out` cannot be written.
    """
    runs = load_runs(folders, labels)
    write_whole(out, picture(runs, title=text_of(title)).encode())
    return out


def picture(runs: Sequence[LoadedRun], *, title: str = "") -> str:
    """An SVG document: accuracy against time and bytes; for one run its batches and uplinks, for
    several their loss and drift."""
    charts = [
        progress_charts.accuracy_against_time(runs),
        progress_charts.accuracy_against_bytes(runs),
    ]
    if len(runs) == 1:
        charts += [resource_charts.batch_sizes(runs[0]), progress_charts.drift_against_time(runs)]
        wide = resource_charts.uplinks(runs[0])
        if sum(len(chart.svg) for chart in [*charts, wide]) <= _BYTES:
            charts.append(wide)
        legend = resource_charts.legend(runs[0])
    else:
        charts += [
            progress_charts.loss_against_time(runs),
            progress_charts.drift_against_time(runs),
        ]
        legend = [(run.label, colour(index, len(runs))) for index, run in enumerate(runs)]
    heading = title or ", ".join(dict.fromkeys(run.job.metadata.name for run in runs))
    return assemble_svg(charts, legend, title=heading)


def assemble_svg(charts: Sequence[Chart], legend: Sequence[tuple[str, str]], *, title: str) -> str:
    """An SVG document of these charts below a legend of (name, colour)."""
    parts, top_y = _legend(legend)
    for chart, x, y, width, height in _places(charts, top_y):
        parts.append(_placed(chart, x, y, width, height))
        bottom_y = y + height
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w:g} {h:g}" role="img" '
        'aria-label="{title}"><style>{style}</style>'
        '<rect class="paper" x="0.5" y="0.5" width="{inner_w:g}" height="{inner_h:g}" rx="10"/>'
        '<text class="words title" x="{x:g}" y="{y:g}">{title}</text>{parts}</svg>\n'
    ).format(
        w=_WIDTH,
        h=bottom_y + _MARGIN,
        inner_w=_WIDTH - 1,
        inner_h=bottom_y + _MARGIN - 1,
        title=title,
        style=Markup(_STYLE),  # noqa: S704 - our own
        x=_MARGIN,
        y=_HEAD - 14,
        parts=Markup("").join(parts),
    )


def _legend(names: Sequence[tuple[str, str]]) -> tuple[list[Markup], float]:
    """The legend, and the y position below it."""
    columns = int((_WIDTH - 2 * _MARGIN) // _LEGEND_COLUMN)
    parts = []
    for index, (name, mark) in enumerate(names):
        row, column = divmod(index, columns)
        x, y = _MARGIN + column * _LEGEND_COLUMN, _HEAD + row * _LEGEND_LINE
        parts.append(
            Markup(
                '<rect x="{x:g}" y="{y:g}" width="18" height="4" rx="2" style="fill: {mark}"/>'
                '<text class="words" x="{text_x:g}" y="{text_y:g}">{name}</text>'
            ).format(x=x, y=y + 5, mark=page_colour(mark), text_x=x + 24, text_y=y + 12, name=name)
        )
    rows = -(-len(names) // columns)
    return parts, _HEAD + rows * _LEGEND_LINE + _GAP


def _places(
    charts: Sequence[Chart], top_y: float
) -> Iterator[tuple[Chart, float, float, float, float]]:
    """(chart, x, y, width, height): two in a row, wide ones alone, proportions kept."""
    full = _WIDTH - 2 * _MARGIN
    half = (full - _GAP) / 2
    y, column, row_height = top_y, 0, 0.0
    for chart in charts:
        width = full if chart.wide else half
        view_box = _VIEW_BOX.search(chart.svg)
        assert view_box is not None, "to_svg keeps the view box"
        height = _CAPTION + width * float(view_box[2]) / float(view_box[1])
        if chart.wide and column:
            y, column, row_height = y + row_height + _GAP, 0, 0.0
        yield chart, _MARGIN + column * (half + _GAP), y, width, height
        row_height = max(row_height, height)
        if chart.wide or column:
            y, column, row_height = y + row_height + _GAP, 0, 0.0
        else:
            column = 1


def _placed(chart: Chart, x: float, y: float, width: float, height: float) -> Markup:
    inner = str(chart.svg).replace(  # Markup would escape the inserted text
        "<svg ",
        f'<svg x="{x:g}" y="{y + _CAPTION:g}" width="{width:g}" height="{height - _CAPTION:g}" ',
        1,
    )
    name = f'<text class="words name" x="{x:g}" y="{y + 12:g}">{escape(chart.title)}</text>'
    return Markup(name + inner)  # noqa: S704 - our own SVG; the title was escaped
