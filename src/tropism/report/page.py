"""Reads runs and writes their page and figures."""

import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tropism.errors import OutputError, UsageError, clause, first_line
from tropism.files import output
from tropism.observe.console import Voice
from tropism.observe.file_kinds import check_kind
from tropism.observe.lock import check_owned
from tropism.observe.metrics import BOOKKEEPING
from tropism.observe.page import render_page
from tropism.observe.rundir import REPORT
from tropism.report import draw
from tropism.report.charts import Chart, charts_of
from tropism.report.compare import PairAccuracy, differing_options, pair_accuracies
from tropism.report.read import Array, RunReport, plain, read_run

_DIGITS = 7  # of embedded numbers, as many as float32 has


@dataclass(frozen=True)
class Report:
    """Runs with their figures, and what compares them.

    Args:
        runs: in the order given.
        charts: their figures.
        pairs: held-out pairs that all runs have.
        accuracies: of each run on them; empty for one run, or without such pairs.
    """

    runs: list[RunReport]
    charts: list[Chart]
    pairs: int
    accuracies: list[PairAccuracy]


@dataclass(frozen=True)
class _Figure:
    """A figure on the page: its drawing, and the legend as (class, color, text)."""

    chart: Chart
    svg: Markup
    legend: list[tuple[str, int, str]]


def report(paths: Sequence[Path]) -> Report:
    """Read runs for a report.

    Raises:
        UsageError: if a directory holds no run, or is named twice.
        DataError: with FILE:LINE, for a damaged file.
    """
    resolved = [path.expanduser().resolve() for path in paths]
    for number, path in enumerate(resolved):
        if path in resolved[:number]:
            raise UsageError(f"{paths[number]} is named twice")
    runs = [read_run(path, name) for path, name in zip(resolved, _names(resolved), strict=True)]
    pairs, accuracies = pair_accuracies(runs) if len(runs) > 1 else (0, [])
    return Report(runs, charts_of(runs), pairs, accuracies)


def write_page(found: Report, path: Path) -> None:
    """Write the page: one file that needs no other. A stream gets its content, and a symbolic link stays one.

    Raises:
        UsageError: if matplotlib is not installed.
        OutputError: if the disk refuses.
    """
    draw.require_matplotlib()
    figures = [_Figure(chart, Markup(draw.to_svg(chart, number)), _legend(chart))  # noqa: S704 (of numbers, and labels of our own)
               for number, chart in enumerate(found.charts)]
    text = render_page("report.html.jinja", report=found, figures=figures, data=_embedded(found.charts),
                       before_after=[_before_after(run) for run in found.runs],
                       differing=differing_options(found.runs) if len(found.runs) > 1 else [], plain=plain)
    content = text.encode("utf-8", "backslashreplace")
    with output(path, len(content)) as temporary:
        temporary.write_bytes(content)


def report_on(run: Path, voice: Voice) -> None:
    """Write the page of a finished run into its directory, if figures can be drawn. A failure is a note: the run is
    complete without it."""
    if os.environ.get("TROPISM_NO_REPORT") or importlib.util.find_spec("matplotlib") is None:
        return
    try:
        check_owned(run, run / REPORT)
        check_kind(run / REPORT)
        write_page(report([run]), run / REPORT)
    except Exception as error:  # of matplotlib too: a run that is done does not fail by its page
        voice.warn(f"{clause(first_line(error))}. The run is complete without its report.")
        return
    voice.say(f"report: {run / REPORT}")


def write_figures(found: Report, directory: Path) -> list[Path]:
    """Write each figure as a PNG file, and return their paths.

    Raises:
        UsageError: if matplotlib is not installed.
        OutputError: if the disk refuses.
    """
    draw.require_matplotlib()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError.because(directory, error) from error
    paths = [directory / f"{number:02d}-{_file_name(chart.name)}.png" for number, chart in enumerate(found.charts, 1)]
    for chart, path in zip(found.charts, paths, strict=True):
        draw.write_png(chart, path)
    return paths


def _names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, with its parent where two are equal."""
    names = [path.name or str(path) for path in paths]
    return [f"{path.parent.name}/{name}" if names.count(name) > 1 else name
            for path, name in zip(paths, names, strict=True)]


def _file_name(name: str) -> str:
    return "".join(char if char.isalnum() or char in "-_." else "_" for char in name)


def _legend(chart: Chart) -> list[tuple[str, int, str]]:
    found: list[tuple[str, int, str]] = [(line.style, draw.color_of(line.color), line.label) for line in chart.lines]
    found += [("band", draw.color_of(band.color), band.label) for band in chart.bands]
    return found + [("level", -1 if name == "chance" else draw.color_of(place + 1), f"{name} {value:.3f}")
                    for place, (name, value) in enumerate(chart.levels.items())]


def _embedded(charts: Sequence[Chart]) -> Markup:
    """The arrays of all figures as JSON that a page can hold: no `<` ends its element."""
    axes: dict[str, str] = {}
    steps: dict[str, list[float]] = {}

    def axis(x: Array) -> str:
        key = x.tobytes().hex() if x.size < 64 else str(hash(x.tobytes()))
        if key not in axes:
            axes[key] = f"x{len(axes)}"
            steps[axes[key]] = _short(x)
        return axes[key]

    figures = [{"name": chart.name, "title": chart.title, "levels": chart.levels,
                "lines": [{"label": line.label, "x": axis(line.x), "y": _short(line.y)} for line in chart.lines],
                "bands": [{"label": band.label, "x": axis(band.x), "low": _short(band.low), "high": _short(band.high)}
                          for band in chart.bands]} for chart in charts]
    text = json.dumps({"x": steps, "figures": figures}, separators=(",", ":"))
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)  # noqa: S704 (no character of markup is left)


def _short(values: Array) -> list[float]:
    """Values with `_DIGITS` digits, whole ones as such."""
    rounded = (float(f"{value:.{_DIGITS}g}") for value in values.tolist())
    return [int(value) if value.is_integer() and abs(value) < 2**53 else value for value in rounded]


def _before_after(run: RunReport) -> list[tuple[str, str, str]]:
    """Each metric of the evaluations before and after training; of the train records without evaluations."""
    records = run.of("eval") or run.of("train")
    if not records:
        return []
    return [(key, _cell(records[0], key), _cell(records[-1], key)) for key in records[-1]
            if key not in ("step", "split", *BOOKKEEPING) and not key.endswith(("_low", "_high"))]


def _cell(record: dict[str, Any], key: str) -> str:
    value, low, high = (record.get(name) for name in (key, f"{key}_low", f"{key}_high"))
    if value is None:
        return "-"
    text = f"{value:.4f}" if float(f"{value:.4f}") else "0.0000"
    return text if low is None or high is None else f"{text} [{low:.3f}, {high:.3f}]"
