"""A small chart as SVG: how cost grows with work, both relative to the first point, on logarithmic axes."""

import html
import math
from collections.abc import Mapping, Sequence

_PANEL, _MARGIN, _TOP = 200, 34, 26
Point = tuple[str, float, float]
"""Label, work and cost."""


def chart(panels: Mapping[str, Sequence[Point]]) -> str:
    """An SVG with a panel for each series; the gray line is cost that grows exactly as the work does."""
    wide = len(panels) * (_PANEL + _MARGIN) + _MARGIN
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {_PANEL + _TOP + 44}" '
             f'font-family="sans-serif" font-size="10" fill="#444">'
             f'<rect width="100%" height="100%" fill="#fff"/>']
    for number, (title, points) in enumerate(panels.items()):
        parts += _panel(title, points, _MARGIN + number * (_PANEL + _MARGIN))
    return "\n".join([*parts, "</svg>\n"])


def _panel(title: str, points: Sequence[Point], left: float) -> list[str]:
    work = [math.log10(point[1] / points[0][1]) for point in points]
    cost = [math.log10(point[2] / points[0][2]) for point in points]
    low, high = min(*work, *cost, 0.0), max(*work, *cost, 0.3)
    span = high - low

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (x - low) / span * _PANEL, _TOP + _PANEL - (y - low) / span * _PANEL

    (x0, y0), (x1, y1) = place(low, low), place(high, high)
    parts = [f'<text x="{left}" y="16" font-size="12">{html.escape(title)}</text>',
             f'<rect x="{left}" y="{_TOP}" width="{_PANEL}" height="{_PANEL}" fill="none" stroke="#ccc"/>',
             f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="#bbb"/>']
    places = [place(*both) for both in zip(work, cost, strict=True)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#06c" stroke-width="1.5"/>')
    for (label, _, _), (x, y) in zip(points, places, strict=True):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#06c"/>'
                     f'<text x="{min(x + 4, left + _PANEL - 24):.1f}" y="{min(y + 12, _TOP + _PANEL - 3):.1f}">'
                     f'{html.escape(label)}</text>')
    parts.append(f'<text x="{left}" y="{_TOP + _PANEL + 14}">work: up to {10 ** max(work):.3g} times</text>'
                 f'<text x="{left}" y="{_TOP + _PANEL + 28}">cost: up to {10 ** max(cost):.3g} times</text>')
    return parts
