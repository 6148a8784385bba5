"""Divergence against size as an SVG: one point for each model, one line for each series, KL on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from kvarn.errors import InvalidParameter
from kvarn.evaluation.report import EvaluationReport

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 130, 30, 50
LEAST_KL = 1e-7  # what is closer to the source is drawn here
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
LETTER_WIDTH, LINE_HEIGHT = 7, 12  # of a label, about
COLOURS = ("#246", "#a52", "#473", "#737")


@dataclass(frozen=True, slots=True)
class PlotPoint:
    """A model: megabytes, mean KL and its standard error. series: points that one line joins; several are named."""

    label: str
    megabytes: float
    kl: float
    error: float
    series: str = ""


@dataclass(frozen=True, slots=True)
class BitScale:
    """Bits per weight beside megabytes, for files of one model; other_bytes: of a file, beside its weights."""

    num_weights: int
    other_bytes: float

    def megabytes(self, bits: float) -> float:
        return (bits * self.num_weights / 8 + self.other_bytes) / 1e6


@dataclass(frozen=True, slots=True)
class _Axes:
    low_mb: float
    high_mb: float
    low_kl: float  # powers of ten
    high_kl: float

    def x(self, megabytes: float) -> float:
        return LEFT + (megabytes - self.low_mb) / (self.high_mb - self.low_mb) * (WIDTH - LEFT - RIGHT)

    def y(self, kl: float) -> float:
        share = (math.log10(max(kl, LEAST_KL)) - self.low_kl) / (self.high_kl - self.low_kl)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def plot_points(reports: Sequence[EvaluationReport]) -> list[PlotPoint]:
    """The models that were compared with a source, smallest first."""
    found = [
        PlotPoint(one.model, one.num_bytes / 1e6, one.divergence.kl_mean, one.divergence.kl_mean_error)
        for one in reports
        if one.divergence is not None
    ]
    return sorted(found, key=lambda point: point.megabytes)


def bit_scale(reports: Sequence[EvaluationReport]) -> BitScale | None:
    """The scale of models that have equally many weights; None for others."""
    first = reports[0]
    if any(one.num_weights != first.num_weights for one in reports):
        return None
    return BitScale(first.num_weights, first.num_bytes - first.bits_per_weight * first.num_weights / 8)


def svg(points: Sequence[PlotPoint], title: str, bits: BitScale | None = None) -> str:
    """Draw points as an SVG document; bits: a second scale, on top."""
    if not points:
        raise InvalidParameter("a plot needs models that were compared with a source; give --against", field="plot")
    axes = _axes(points)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>',
        *_grid(axes),
        *([] if bits is None else _bit_marks(axes, bits)),
        *_curves(axes, points),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _axes(points: Sequence[PlotPoint]) -> _Axes:
    sizes = [point.megabytes for point in points]
    logs = [math.log10(max(point.kl, LEAST_KL)) for point in points]
    room = max((max(sizes) - min(sizes)) * 0.08, max(sizes) * 0.02)
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    return _Axes(max(0.0, min(sizes) - room), max(sizes) + room, low, max(high, low + 1))


def _grid(axes: _Axes) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for power in range(int(axes.low_kl), int(axes.high_kl) + 1):
        y = axes.y(10.0**power)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
    for megabytes in _ticks(axes.low_mb, axes.high_mb):
        x = axes.x(megabytes)
        yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#eee"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{megabytes:g}</text>'
    yield f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 10}" text-anchor="middle">size, MB</text>'
    middle = (TOP + bottom) / 2
    yield f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">mean KL, nats</text>'


def _bit_marks(axes: _Axes, scale: BitScale) -> Iterator[str]:
    """Whole numbers of bits per weight."""
    whole = [bits for bits in range(1, 33) if axes.low_mb <= scale.megabytes(bits) <= axes.high_mb]
    for bits in whole:
        x = axes.x(scale.megabytes(bits))
        yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + 6}" stroke="#666"/>'
        yield f'<text x="{x:.1f}" y="{TOP + 18}" text-anchor="middle" fill="#666">{bits}</text>'
    if whole:
        yield f'<text x="{WIDTH - RIGHT + 8}" y="{TOP + 18}" fill="#666">bits per weight</text>'


def _ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 6
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(step * scale for step in STEPS if step * scale >= rough)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _curves(axes: _Axes, points: Sequence[PlotPoint]) -> Iterator[str]:
    yield from _labels(axes, points)
    names = list(dict.fromkeys(point.series for point in points))
    for number, name in enumerate(names):
        colour = COLOURS[number % len(COLOURS)]
        yield from _curve(axes, [point for point in points if point.series == name], colour)
        if len(names) > 1:
            y = HEIGHT - BOTTOM - 14 - 18 * (len(names) - 1 - number)  # below falling curves
            yield f'<circle cx="{LEFT + 14}" cy="{y - 4}" r="4" fill="{colour}"/>'
            yield f'<text x="{LEFT + 24}" y="{y}">{escape(name)}</text>'


def _curve(axes: _Axes, points: Sequence[PlotPoint], colour: str) -> Iterator[str]:
    path = " ".join(f"{axes.x(point.megabytes):.1f},{axes.y(point.kl):.1f}" for point in points)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-opacity="0.5" stroke-dasharray="3 3"/>'
    for point in points:
        x, y = axes.x(point.megabytes), axes.y(point.kl)
        top, bottom = axes.y(point.kl + point.error), axes.y(max(point.kl - point.error, LEAST_KL))
        yield f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="{colour}"/>'
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{escape(point.label)}</title></circle>'


def _labels(axes: _Axes, points: Sequence[PlotPoint]) -> Iterator[str]:
    """Each beside its point, where no other label is already; above and to the right where there is no such place."""
    taken: list[tuple[float, float, float, float]] = []
    for point in points:
        x, y, width = axes.x(point.megabytes), axes.y(point.kl), LETTER_WIDTH * len(point.label)
        places = [(left, below) for below in (y - 6, y + 16) for left in (x + 8, x - 8 - width)]
        boxes = [(left, below - LINE_HEIGHT, left + width, below) for left, below in places]
        box = next((one for one in boxes if not any(_overlap(one, other) for other in taken)), boxes[0])
        taken.append(box)
        yield f'<text x="{box[0]:.1f}" y="{box[3]:.1f}">{escape(point.label)}</text>'


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
