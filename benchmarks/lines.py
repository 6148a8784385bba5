"""Line plots as one SVG: several panels side by side, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#1b6ca8", "#d9a441", "#8c6bb1", "#7fa87f", "#c97b7b")
PANEL_PX, HEIGHT_PX, LEFT_PX, TOP_PX, BOTTOM_PX = 360, 300, 56, 44, 40

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """lines[name] are points; all values are above 0."""

    title: str
    x_label: str
    lines: Mapping[str, Points]


def svg(panels: Sequence[Panel]) -> str:
    """All panels in one row."""
    width = PANEL_PX * len(panels)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT_PX}" font-family="sans-serif">'
    parts = [_draw(panel, index * PANEL_PX) for index, panel in enumerate(panels)]
    return "\n".join([head, '<rect width="100%" height="100%" fill="white" />', *parts, "</svg>", ""])


@dataclass(frozen=True, slots=True)
class _Scale:
    """Logarithmic, from the least value to the largest."""

    least: float
    most: float
    start_px: float
    end_px: float

    def at(self, value: float) -> float:
        span = math.log(self.most / self.least) or 1.0
        return self.start_px + (self.end_px - self.start_px) * math.log(value / self.least) / span


def _draw(panel: Panel, left: float) -> str:
    xs = sorted({x for points in panel.lines.values() for x, _ in points})
    ys = [y for points in panel.lines.values() for _, y in points]
    across = _Scale(xs[0], xs[-1], left + LEFT_PX, left + PANEL_PX - 16)
    up = _Scale(min(ys), max(ys), HEIGHT_PX - BOTTOM_PX, TOP_PX)
    parts = [_text(left + LEFT_PX, 18, panel.title), _text(left + PANEL_PX / 2, HEIGHT_PX - 6, panel.x_label, "middle")]
    parts += [_text(across.at(x), HEIGHT_PX - BOTTOM_PX + 16, f"{x:g}", "middle") for x in xs]
    parts += [_text(left + LEFT_PX - 6, up.at(y), f"{y:,.3g}", "end") for y in (min(ys), max(ys))]
    for index, (name, points) in enumerate(panel.lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" />')
        parts += [_dot(across.at(x), up.at(y), colour, f"{name}: {x:g}, {y:.4g}") for x, y in points]
        parts.append(_text(left + LEFT_PX + 6, TOP_PX + 12 * index, name, colour=colour))
    return "\n".join(parts)


def _dot(x: float, y: float, colour: str, hint: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{escape(hint)}</title></circle>'


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "black") -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" font-size="11" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {place}>{escape(text)}</text>"
