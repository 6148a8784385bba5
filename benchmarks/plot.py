"""One SVG of all engines against the ceiling: bars as shares of it, so that rows of any speed stand side by side."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

COLOURS = ("#1b6ca8", "#b8b8b8", "#d9a441", "#8c6bb1", "#7fa87f", "#c97b7b")
LABELS_PX, BARS_PX, NUMBERS_PX = 110, 460, 80
BAR_PX, GAP_PX, TOP_PX = 12, 10, 56


def svg(title: str, speeds: Mapping[str, Mapping[str, float]], ceilings: Mapping[str, float]) -> str:
    """speeds[engine][row] and ceilings[row] in tokens a second; a row without a ceiling ends at its fastest bar."""
    rows = list(dict.fromkeys(row for found in speeds.values() for row in found))
    width = LABELS_PX + BARS_PX + NUMBERS_PX
    group_px = len(speeds) * BAR_PX + GAP_PX
    parts = [_legend(title, speeds)]
    for index, row in enumerate(rows):
        top = TOP_PX + index * group_px
        full = ceilings.get(row) or max(found.get(row, 0.0) for found in speeds.values())
        parts.append(_text(LABELS_PX - 8, top + group_px / 2, row, "end"))
        for place, (engine, found) in enumerate(speeds.items()):
            if row in found:
                parts.append(_bar(top + place * BAR_PX, found[row], full, COLOURS[place % len(COLOURS)], engine))
    height = TOP_PX + len(rows) * group_px + 8
    if ceilings:
        edge = LABELS_PX + BARS_PX
        parts.append(f'<line x1="{edge}" x2="{edge}" y1="{TOP_PX - 8}" y2="{height - 8}" stroke="#a00" />')
        parts.append(_text(edge, TOP_PX - 12, "ceiling", "middle"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white" />', *parts, "</svg>", ""])


def _legend(title: str, engines: Mapping[str, object]) -> str:
    parts, left = [_text(8, 16, title)], 8.0
    for place, engine in enumerate(engines):
        parts.append(f'<rect x="{left:.0f}" y="24" width="10" height="10" fill="{COLOURS[place % len(COLOURS)]}" />')
        parts.append(_text(left + 14, 33, engine))
        left += 26 + 7 * len(engine)
    return "\n".join(parts)


def _bar(top: float, speed: float, full: float, colour: str, engine: str) -> str:
    length = BARS_PX * min(speed / full, 1.1)
    bar = f'<rect x="{LABELS_PX}" y="{top:.0f}" width="{length:.1f}" height="{BAR_PX - 2}" fill="{colour}">'
    hint = f"<title>{escape(engine)} {speed:.1f} tokens/s, {speed / full:.0%}</title></rect>"
    return bar + hint + _text(LABELS_PX + length + 4, top + BAR_PX - 3, f"{speed:,.0f}")


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="11" text-anchor="{anchor}">{escape(text)}</text>'
