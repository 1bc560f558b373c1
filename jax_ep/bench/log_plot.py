"""Draws a plot with two logarithmic axes as SVG, without matplotlib."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax_ep.bench.page import FONT

# Each colour is readable on white and on black.
_COLOURS = ("#2f81f7", "#d9730d", "#2da44e", "#bf4bbf", "#d1435b", "#0f9aa8", "#8a7500", "#7d6bd9")
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 480, 48, 464, 30, 250  # of the picture; of the area between the axes
_LINE, _GAP = 20, 40  # pixels of a line of text, and between two labels of the x axis
_STYLE = (
    f".plot {{ font: 13px {FONT}; fill: currentColor }} "
    "@media (prefers-color-scheme: dark) { .plot { color: #e6e6e6 } }"
)
Point = tuple[float, float]


class Series(NamedTuple):
    """Points (x, y), all positive, and the points of the floor below them. Both may be in any order."""

    label: str
    points: Sequence[Point]
    floor: Sequence[Point]


def draw(series: Sequence[Series], *, title: str, x_label: str, y_label: str) -> str:
    """Returns an SVG: a solid line for each series, in a colour of its own, and its floor as a dashed line.

    The colours of text and axes follow the page, and the reader's choice of dark or light.
    """
    xs, ys = zip(*(point for one in series for point in (*one.points, *one.floor)), strict=True)
    ticks = _ticks(min(ys), max(ys))
    x_of = _scale(*((min(xs), max(xs)) if min(xs) < max(xs) else (xs[0] / 2, xs[0] * 2)), _LEFT + 12, _RIGHT - 12)
    y_of = _scale(ticks[0], ticks[-1], _BOTTOM, _TOP)
    parts = [_text(4, 16, y_label, "start"), _text((_LEFT + _RIGHT) / 2, _BOTTOM + 2 * _LINE, x_label)]
    for tick in ticks:
        y = y_of(tick)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="currentColor" stroke-opacity="0.2"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{tick:g}", "end"))
    for x in _far_apart(sorted(set(xs)), x_of):
        parts.append(_text(x_of(x), _BOTTOM + _LINE, f"{x:g}"))
    for colour, one in zip(itertools.cycle(_COLOURS), series, strict=False):
        for points, radius, dashes in ((one.floor, 2, ' stroke-dasharray="5 4"'), (one.points, 3.5, "")):
            places = [(x_of(x), y_of(y), f"{y:.4g}") for x, y in sorted(points)]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
            for x, y, value in places:
                circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}">'
                parts.append(f"{circle}<title>{value}</title></circle>")
    legend = [(one.label, colour, "") for colour, one in zip(itertools.cycle(_COLOURS), series, strict=False)]
    if any(one.floor for one in series):
        legend.append(("floor of the link", "currentColor", ' stroke-dasharray="5 4"'))
    bottom = _BOTTOM + 3 * _LINE
    for y, (label, colour, dashes) in enumerate(legend):
        y = bottom + y * _LINE
        parts.append(f'<path d="M{_LEFT} {y}h28" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts.append(_text(_LEFT + 36, y + 4, label, "start"))
    size = f'viewBox="0 0 {_WIDTH} {bottom + len(legend) * _LINE}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" role="img" aria-label="{html.escape(title)}" {size}>'
    return "\n".join([head, f"<style>{_STYLE}</style>", *parts, "</svg>\n"])


def _ticks(low: float, high: float) -> list[float]:
    """Returns the numbers 1, 2, 5, 10, 20, ... from the last at or below `low` to the first at or above `high`."""
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    numbers = [float(f"{digit}e{exponent}") for exponent in exponents for digit in (1, 2, 5)]
    first = max(index for index, number in enumerate(numbers) if number <= low)
    last = min(index for index, number in enumerate(numbers) if number >= high)
    return numbers[first : max(last, first + 1) + 1]


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Returns the function from a value to its pixel: logarithmic, `low` is at `start`, and `high` at `end`."""
    return lambda value: start + (end - start) * math.log(value / low) / math.log(high / low)


def _far_apart(values: Sequence[float], pixel: Callable[[float], float]) -> list[float]:
    """Returns the ascending values whose labels do not touch."""
    kept: list[float] = []
    for value in values:
        if not kept or pixel(value) - pixel(kept[-1]) >= _GAP:
            kept.append(value)
    return kept


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
