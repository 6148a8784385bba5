"""Figures of fleets as an SVG: hit rate, time to a first token and cost of a choice against the number of replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from kvarn.bench.fleet.simulation import FleetFigures

WIDTH, HEIGHT, GAP, EDGE = 300, 220, 64, 34
COLOURS = {"prefix": "#246", "text_tree": "#a52", "least_loaded": "#473", "round_robin": "#737"}
Value = Callable[[FleetFigures], float]
PANELS: tuple[tuple[str, Value, str], ...] = (
    ("cached prompt tokens, %", lambda one: 100 * one.hit_rate, "{:.0f}"),
    ("first token, p99, ms", lambda one: 1000 * one.ttft_p99, "{:.0f}"),
    ("choice, µs of CPU", lambda one: one.choice_us + one.feed_us, "{:.0f}"),
)


def curves(figures: Sequence[FleetFigures], title: str) -> str:
    """One panel for each quantity, one line for each policy; replicas on a logarithmic scale."""
    total = len(PANELS) * (WIDTH + GAP) + GAP
    panels = "".join(
        f'<g transform="translate({GAP + number * (WIDTH + GAP)},{EDGE + 20})">{"".join(_panel(figures, *panel))}</g>'
        for number, panel in enumerate(PANELS)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{HEIGHT + 2 * EDGE + 40}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{GAP}" y="22" font-size="13">{escape(title)}</text>{panels}{_legend(figures)}</svg>\n'
    )


def _panel(figures: Sequence[FleetFigures], name: str, value: Value, shown: str) -> Iterator[str]:
    highest = max(map(value, figures)) * 1.05 or 1.0
    sizes = sorted({one.replicas for one in figures})
    low, high = math.log(sizes[0]), math.log(sizes[-1]) if len(sizes) > 1 else math.log(sizes[0]) + 1

    def x(size: int) -> float:
        return (math.log(size) - low) / (high - low) * WIDTH

    def y(amount: float) -> float:
        return HEIGHT * (1 - amount / highest)

    yield f'<text x="0" y="-8">{escape(name)}</text><path d="M0,0V{HEIGHT}H{WIDTH}" fill="none" stroke="#888"/>'
    for share in (0.0, 0.5, 1.0):
        label = shown.format(share * highest / 1.05)
        yield f'<text x="-6" y="{y(share * highest / 1.05) + 4:.1f}" text-anchor="end">{label}</text>'
    for size in sizes:
        yield f'<text x="{x(size):.1f}" y="{HEIGHT + 15}" text-anchor="middle">{size:,}</text>'
    for policy in dict.fromkeys(one.policy for one in figures):
        mine = sorted((one for one in figures if one.policy == policy), key=lambda one: one.replicas)
        points = " ".join(f"{x(one.replicas):.1f},{y(value(one)):.1f}" for one in mine)
        yield f'<polyline points="{points}" fill="none" stroke="{COLOURS[policy]}" stroke-width="2"/>'
        for one in mine:
            yield f'<circle cx="{x(one.replicas):.1f}" cy="{y(value(one)):.1f}" r="3" fill="{COLOURS[policy]}"/>'


def _legend(figures: Sequence[FleetFigures]) -> str:
    names = dict.fromkeys(one.policy for one in figures)
    return "".join(
        f'<text x="{GAP + 120 * place}" y="{HEIGHT + 2 * EDGE + 28}" fill="{COLOURS[name]}">{escape(name)}</text>'
        for place, name in enumerate(names)
    )
