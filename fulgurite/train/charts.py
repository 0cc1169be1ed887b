"""Charts of a report: numbers in, SVG out, with colours from the page's style sheet.

A curve has at most `MAX_POINTS` points: of more, the mean, the least and the greatest of neighbours, so
that no spike is lost. Numbers that are not finite are gaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fulgurite.report.markup import Markup, make_element

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 26
MAX_POINTS = 400
NUM_TICKS = 5

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """Points of one line. `style`: 0 is thin and quiet, 1 the main one, 2 another one."""

    name: str
    points: Sequence[Point]
    style: int = 1
    has_dots: bool = False


@dataclass(frozen=True)
class Band:
    """The least and the greatest of neighbouring points, of curves that were thinned."""

    x: float
    low: float
    high: float


def format_number(value: float) -> str:
    """Short: `1.2k`, `3.4M`, `0.0012`, `1e-05`."""
    size = abs(value)
    for unit, limit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    if size and size < 1e-3:
        return f"{value:.0e}"
    return f"{value:.4g}"


def nice_ticks(low: float, high: float, count: int = NUM_TICKS) -> list[float]:
    """Round numbers between two others: steps of 1, 2 or 5 times a power of ten."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 5) if m * power >= raw), 10 * power)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> tuple[list[Point], list[Band]]:
    """At most `limit` points, and the range of each if points were merged."""
    finite = [point for point in points if math.isfinite(point[1])]
    if len(finite) <= limit:
        return finite, []
    merged, bands = [], []
    for place in range(limit):
        part = finite[place * len(finite) // limit : (place + 1) * len(finite) // limit]
        x = part[len(part) // 2][0]
        values = [value for _, value in part]
        merged.append((x, sum(values) / len(values)))
        bands.append(Band(x, min(values), max(values)))
    return merged, bands


def smooth(points: Sequence[Point], share: float = 0.02) -> list[Point]:
    """The mean over neighbours on both sides, this share of all points together."""
    finite = [point for point in points if math.isfinite(point[1])]
    reach = round(share * len(finite) / 2)
    sums = [0.0, *accumulate(value for _, value in finite)]
    result = []
    for place, (x, _) in enumerate(finite):
        near = min(reach, place, len(finite) - 1 - place)  # as many before as after: no lag
        first, last = place - near, place + near + 1
        result.append((x, (sums[last] - sums[first]) / (last - first)))
    return result


@dataclass(frozen=True)
class _Frame:
    """Where numbers are in the picture."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        span = (self.x_high - self.x_low) or 1.0
        return round(LEFT + (value - self.x_low) / span * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        span = (self.y_high - self.y_low) or 1.0
        return round(HEIGHT - BOTTOM - (value - self.y_low) / span * (HEIGHT - TOP - BOTTOM), 1)


def draw_curves(
    title: str,
    curves: Sequence[Curve],
    *,
    from_zero: bool = False,
    format_value: Callable[[float], str] = format_number,
) -> Markup:
    """A figure with one or more curves over steps; empty if there is nothing to draw."""
    thinned = [(curve, *thin(curve.points)) for curve in curves]
    points = [point for _, found, _ in thinned for point in found]
    if not points:
        return Markup("")
    frame = _fit(points, [band for _, _, bands in thinned for band in bands], from_zero)
    parts: list[Markup] = [*_draw_axes(frame, format_value)]
    for curve, found, bands in thinned:
        parts += _draw_curve(curve, found, bands, frame, format_value)
    svg = make_element(
        "svg",
        make_element("title", title),
        *parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
    )
    return make_element("figure", _draw_caption(title, curves, thinned, format_value), svg)


def _fit(points: Sequence[Point], bands: Sequence[Band], from_zero: bool) -> _Frame:
    xs = [x for x, _ in points]
    ys = sorted(y for _, y in points)
    low, high = ys[0], ys[-1]
    if bands:  # single spikes of thousands of steps may leave the picture
        low = min(low, *(band.low for band in bands))
    low = min(0.0, low) if from_zero else low
    margin = (high - low) * 0.04 or abs(high) * 0.04 or 1.0
    return _Frame(min(xs), max(xs), low if from_zero else low - margin, high + margin)


def _draw_axes(frame: _Frame, format_value: Callable[[float], str]) -> list[Markup]:
    parts = []
    for tick in nice_ticks(frame.y_low, frame.y_high):
        y = frame.y(tick)
        parts.append(make_element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(
            make_element("text", format_value(tick), x=LEFT - 7, y=y + 4, text_anchor="end")
        )
    for tick in nice_ticks(frame.x_low, frame.x_high):
        parts.append(
            make_element(
                "text", f"{tick:,.0f}", x=frame.x(tick), y=HEIGHT - 8, text_anchor="middle"
            )
        )
    return parts


def _draw_curve(
    curve: Curve,
    points: Sequence[Point],
    bands: Sequence[Band],
    frame: _Frame,
    format_value: Callable[[float], str],
) -> list[Markup]:
    parts = []
    if bands:
        upper = [f"{frame.x(band.x)},{max(TOP, frame.y(band.high))}" for band in bands]
        lower = [f"{frame.x(band.x)},{frame.y(band.low)}" for band in reversed(bands)]
        parts.append(
            make_element("polygon", points=" ".join(upper + lower), class_=f"band s{curve.style}")
        )
    line = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in points)
    parts.append(make_element("polyline", points=line, class_=f"curve s{curve.style}"))
    if curve.has_dots or len(points) == 1:
        for x, y in points:
            label = make_element("title", f"step {x:,.0f}: {format_value(y)}")
            parts.append(
                make_element(
                    "circle", label, cx=frame.x(x), cy=frame.y(y), r=3.2, class_=f"s{curve.style}"
                )
            )
    return parts


def _draw_caption(
    title: str,
    curves: Sequence[Curve],
    thinned: Sequence[tuple[Curve, Sequence[Point], Sequence[Band]]],
    format_value: Callable[[float], str],
) -> Markup:
    """The title, and each curve's name with its last value."""
    entries = []
    for curve, points, _ in thinned:
        if points and curve.style:
            value = make_element("b", format_value(points[-1][1]))
            key = make_element("i", class_=f"key s{curve.style}")
            entries.append(make_element("span", key, f"{curve.name} ", value))
    return make_element("figcaption", make_element("strong", title), *entries)


def draw_heat_map(title: str, rows: Sequence[Sequence[float]], note: str) -> Markup:
    """Numbers around 1 as colours: less is cold, more is warm, 1 is the page."""
    if not rows or not rows[0]:
        return Markup("")
    columns = max(len(row) for row in rows)
    size = max(3.0, min(22.0, (WIDTH - LEFT - RIGHT) / columns))
    height = min(22.0, max(6.0, size))
    cells = []
    for number, row in enumerate(rows):
        y = number * height
        if height >= 10 or number % 4 == 0:
            cells.append(
                make_element("text", number, x=LEFT - 8, y=y + height * 0.7, text_anchor="end")
            )
        for place, value in enumerate(row):
            label = make_element("title", f"layer {number}, expert {place}: {value:.2f}×")
            kind, strength = ("hot", value - 1) if value >= 1 else ("cold", 1 - value)
            cells.append(
                make_element(
                    "rect",
                    label,
                    x=round(LEFT + place * size, 2),
                    y=y,
                    width=round(size - 0.6, 2),
                    height=round(height - 0.6, 2),
                    class_=kind,
                    fill_opacity=round(min(1.0, 0.05 + 1.5 * strength), 3),
                )
            )
    svg = make_element(
        "svg", make_element("title", title), *cells, viewBox=f"0 0 {WIDTH} {len(rows) * height:g}"
    )
    caption = make_element(
        "figcaption", make_element("strong", title), make_element("span", note, class_="quiet")
    )
    return make_element("figure", caption, svg, class_="heat")
