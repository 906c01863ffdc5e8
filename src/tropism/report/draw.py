"""Draws the figures of a report: SVG for the page, and PNG files."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np

from tropism.errors import UsageError
from tropism.files import replacing
from tropism.report.charts import Array, Chart

_SIZE = (4.8, 2.6)  # inches; the page scales it
_MOST = 1200  # points of a drawn line: two for each column of the page
_COLORS = ("#2f7d4f", "#b4552d", "#6a7fa8", "#8a5a9e", "#a8862b", "#3b8f95", "#b2486f", "#6d6d6d")
"""Of series, by number. On the page each is a variable, so that they follow light and dark."""
_INK, _GRID = "#1d2322", "#dcdfda"

_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "tropism", "text.parse_math": False, "font.size": 8,
    "font.family": "sans-serif", "text.color": _INK, "axes.edgecolor": _INK, "axes.labelcolor": _INK,
    "xtick.color": _INK, "ytick.color": _INK, "grid.color": _GRID, "axes.spines.top": False,
    "axes.spines.right": False, "axes.linewidth": 0.6, "lines.linewidth": 1.2, "axes.unicode_minus": False}


def require_matplotlib() -> None:
    """Check that figures can be drawn.

    Raises:
        UsageError: if matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("figures need matplotlib. Install it with: pip install 'tropism[plots]'") from None


def to_svg(chart: Chart, number: int) -> str:
    """The figure as an SVG element without references to anything outside of it.

    Args:
        number: of the figure on its page, which makes its ids its own.
    """
    buffer = io.StringIO()
    _figure(chart, buffer, "svg")
    text = buffer.getvalue()
    text = text[text.index("<svg"):]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'\bid="([^"]*)"', rf'id="f{number}-\1"', text)
    text = re.sub(r'href="#([^"]*)"', rf'href="#f{number}-\1"', text)
    text = re.sub(r"url\(#([^)]*)\)", rf"url(#f{number}-\1)", text)
    for place, color in enumerate(_COLORS):
        text = text.replace(color, f"var(--s{place})")
    text = text.replace(_INK, "var(--ink)").replace(_GRID, "var(--line)")
    return re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', text, count=1)


def write_png(chart: Chart, path: Path) -> None:
    """Write the figure as a PNG file.

    Raises:
        OutputError: if the disk refuses.
    """
    with replacing(path) as temporary, temporary.open("wb") as opened:
        _figure(chart, opened, "png", legend=True)


def color_of(number: int) -> int:
    """Number of the variable of a color on the page."""
    return number % len(_COLORS)


def _figure(chart: Chart, target: Any, form: str, legend: bool = False) -> None:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_SETTINGS, **({} if form == "svg" else {"savefig.facecolor": "white"})}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        (FigureCanvasSVG if form == "svg" else FigureCanvasAgg)(figure)
        axes = figure.add_subplot()
        _draw(chart, axes)
        if legend:
            axes.set_title(chart.title, fontsize=9)
            axes.legend(fontsize=6, frameon=False)
        options: dict[str, Any] = {"transparent": True, "metadata": {"Date": None, "Creator": None, "Format": None,
                                   "Type": None}} if form == "svg" else {"dpi": 200}
        figure.savefig(target, format=form, **options)


def _draw(chart: Chart, axes: Any) -> None:
    axes.grid(True, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    for band in chart.bands:
        axes.fill_between(band.x, band.low, band.high, color=_color(band.color), alpha=0.18, linewidth=0,
                          label=band.label)
    for place, (name, value) in enumerate(chart.levels.items()):
        axes.axhline(value, color=_INK if name == "chance" else _color(place + 1), linewidth=0.8,
                     linestyle=(0, (1, 1.5 + place)), label=name)
    for line in chart.lines:
        color = _color(line.color)
        if line.style == "points":
            axes.plot(line.x, line.y, color=color, linestyle="none", marker="o", label=line.label, alpha=0.75,
                      markersize=3.5 if line.x.size < 100 else 1.8, markeredgewidth=0)
        elif line.style == "steps":
            axes.stairs(line.y, line.x, color=color, linewidth=1.2, label=line.label, fill=False)
        else:
            x, y = thinned(line.x, line.y)
            axes.plot(x, y, color=color, linestyle="--" if line.style == "dashed" else "-", label=line.label,
                      marker="o" if x.size < 3 else None, markersize=3)
    if chart.x_label == "step":
        axes.xaxis.get_major_locator().set_params(integer=True)


def thinned(x: Array, y: Array) -> tuple[Array, Array]:
    """A series with so many points as can be seen: the lowest and the highest of each group of neighbors."""
    if x.size <= _MOST:
        return x, y
    kept: set[int] = {0, x.size - 1}
    for group in np.array_split(np.arange(x.size), _MOST // 2):
        kept |= {int(group[y[group].argmin()]), int(group[y[group].argmax()])}
    chosen = np.array(sorted(kept))
    return x[chosen], y[chosen]


def _color(number: int) -> str:
    return _COLORS[color_of(number)]
