"""A profile as an SVG: one bar for each row, cut by where its time went."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from kvarn.bench.profile import ALONE, OTHER, REGIONS, WAITING, Profile

NAMES = (*REGIONS, OTHER, WAITING, ALONE)
BRIGHT = ("#1b6ca8", "#5b8c5a", "#d9a441", "#8c6bb1", "#c97b7b", "#3a9a9a", "#a8763e", "#6f8fc9", "#7fa87f", "#b05c8f")
COLOURS = (*BRIGHT, "#8a8a8a", "#d0d0d0", "#e6e6e6")
LABELS_PX, BARS_PX, LEGEND_PX, BAR_PX, GAP_PX, TOP_PX, LINE_PX = 110, 520, 150, 20, 8, 36, 18


def svg(profile: Profile) -> str:
    """Draw a profile as an SVG document."""
    regions = [name for name in NAMES if any(name in found.shares for found in profile.rows.values())]
    height = TOP_PX + max(len(profile.rows) * (BAR_PX + GAP_PX), len(regions) * LINE_PX) + 8
    width = LABELS_PX + BARS_PX + LEGEND_PX
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    title = _text(8, 18, f"{profile.model}, {profile.isa}, {profile.threads} threads: shares of their time")
    parts = [head, '<rect width="100%" height="100%" fill="white" />', title, *_bars(profile, regions)]
    for place, name in enumerate(regions):
        top = TOP_PX + place * LINE_PX
        parts.append(_box(LABELS_PX + BARS_PX + 14, top, 10, 10, name=name, label=name))
        parts.append(_text(LABELS_PX + BARS_PX + 30, top + 10, name))
    return "\n".join([*parts, "</svg>", ""])


def _bars(profile: Profile, regions: list[str]) -> Iterator[str]:
    for index, (row, found) in enumerate(profile.rows.items()):
        top, left = TOP_PX + index * (BAR_PX + GAP_PX), float(LABELS_PX)
        yield _text(8, top + BAR_PX - 6, row.name)
        for name in regions:
            width = found.shares.get(name, 0.0) * BARS_PX
            yield _box(left, top, width, BAR_PX, name=name, label=f"{name} {found.shares.get(name, 0.0):.1%}")
            left += width


def _box(left: float, top: float, width: float, height: float, *, name: str, label: str) -> str:
    colour = COLOURS[NAMES.index(name)]
    size = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {size} fill="{colour}"><title>{escape(label)}</title></rect>'


def _text(left: float, top: float, text: str) -> str:
    return f'<text x="{left:.0f}" y="{top:.0f}" font-size="12">{escape(text)}</text>'
