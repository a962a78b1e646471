"""Converts Matplotlib figures to SVG for the pictures, in the colours of the page.

Defines the style of their charts.
"""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dlion_api.status_names import ACCURACY
from dlion_results.report.palette import LIGHT

# Placeholder colours for Matplotlib; in the SVG the page's CSS variables replace them.
INK, FAINT, GRID, PAPER = "#010203", "#020304", "#030405", "#040506"
_PAGE_COLOURS = {
    INK: "ink", FAINT: "faint", GRID: "grid", PAPER: "paper",
    **{value: f"c{place}" for place, value in enumerate(LIGHT)},
}  # fmt: skip

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # no TeX: a `$` in a name is a `$`
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9.5,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "lines.linewidth": 1.5,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}

_COORDINATES = re.compile(r'\s(?:d|x|y|transform)="[^"]*"')
_LONG_NUMBER = re.compile(r"(\d+\.\d{2})\d+")


@dataclass(frozen=True)
class Chart:
    """A chart with its texts; `wide` ones take the page's whole width."""

    title: str
    caption: str
    svg: Markup
    wide: bool = False


def colour(index: int, count: int) -> str:
    """The colour of worker or run `index` of `count`."""
    if count <= len(LIGHT):
        return LIGHT[index]
    red, green, blue, _ = mpl.colormaps["turbo"](0.08 + 0.84 * index / (count - 1))
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


@contextmanager
def styled(salt: str) -> Iterator[None]:
    """Context with the page's chart style; `salt` makes the SVG's ids unique."""
    style: Any = {**_STYLE, "svg.hashsalt": salt}  # its declared type lists every possible key
    with mpl.rc_context(style):
        yield


def page_colour(value: str) -> str:
    """The CSS of that colour, which follows light and dark where it is one of the page's."""
    own = _PAGE_COLOURS.get(value)
    return f"var(--{own})" if own else value


def chart(
    title: str,
    caption: str,
    draw: Callable[[Axes], None],
    *,
    height: float = 3.1,
    wide: bool = False,
) -> Chart:
    """A chart with a single pair of axes, drawn by `draw`."""
    with styled(title + caption):
        figure = Figure(figsize=(11.424 if wide else 5.6, height), layout="constrained")
        draw(figure.subplots())
        return Chart(title, caption, to_svg(figure, title), wide)


def to_svg(figure: Figure, title: str) -> Markup:
    """The figure as an SVG element for a page; call it inside `styled`."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)  # inline SVG in HTML needs no namespaces
    text = re.sub(r"<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>", r"<svg \1>", text, count=1)
    text = text.replace("xlink:href", "href").replace("'DejaVu Sans'", "var(--font)")
    for stand_in, own in _PAGE_COLOURS.items():
        text = text.replace(stand_in, f"var(--{own})")
    label = Markup('<svg role="img" aria-label="{}" ').format(title)
    return label + Markup(_shortened(text)[len("<svg ") :])  # noqa: S704 - our own SVG; texts in it were escaped by Matplotlib


def _shortened(svg: str) -> str:
    """The same SVG with coordinates to a hundredth of a point and without line feeds."""
    svg = _COORDINATES.sub(lambda found: _LONG_NUMBER.sub(r"\1", found.group()), svg)
    return re.sub(r"\s*\n\s*", " ", svg)


def time_axis(axes: Axes, seconds: float, since: str = "the start") -> None:
    """Label the horizontal axis in seconds, minutes or hours."""
    unit, length_s = next((unit, s) for unit, s, most in TIME_UNITS if seconds <= most)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / length_s:g}"))
    axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 1.5, 2, 3, 5, 6, 10]))
    if length_s > 1:
        ticks = _round_step(seconds / length_s / 6) * length_s
        axes.xaxis.set_major_locator(mpl.ticker.MultipleLocator(ticks))
    axes.set_xlim(0, seconds or 1)
    axes.set_xlabel(f"time since {since} [{unit}]")


TIME_UNITS: Sequence[tuple[str, float, float]] = (
    ("s", 1.0, 600.0),
    ("min", 60.0, 3 * 3600.0),
    ("h", 3600.0, float("inf")),
)


def _round_step(step: float) -> float:
    """The next of 1, 2, 5, 10, ... (times a power of ten) above `step`."""
    power = 10.0 ** np.floor(np.log10(max(step, 1e-9)))
    return float(next(m * power for m in (1, 2, 5, 10) if m * power >= step * 0.999))


def percent_axis(axes: Axes, label: str) -> None:
    """Label the vertical axis of a fraction in per cent."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:g}"))
    axes.set_ylabel(f"{label} [%]")


def accuracy_axis(axes: Axes, name: str, label: str) -> None:
    """Label the vertical axis of an accuracy, in per cent, or of what stands for it."""
    if name == ACCURACY:
        percent_axis(axes, label)
    else:
        axes.set_ylabel(label)


def draw_message(axes: Axes, text: str) -> None:
    """Show a message instead of a chart."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, ha="center", va="center", color=FAINT, transform=axes.transAxes)
