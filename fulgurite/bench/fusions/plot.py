"""A scatter plot of percent of the copy bandwidth over bytes moved, as SVG.

In: series of (bytes, percent) points. Out: one self-contained image: a logarithmic byte axis, a line at 100 percent,
one marker shape per series, and a tooltip per point.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 860, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 48, 56
# colours differ in lightness and shapes differ, so series can be told apart without colour vision
STYLES = (
    ("#0b6e99", "circle"),
    ("#d9730d", "square"),
    ("#9b9a97", "diamond"),
    ("#6940a5", "ring"),
    ("#448361", "frame"),
)
UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


@dataclass(frozen=True)
class Point:
    name: str
    bytes: float
    percent: float


def draw_plot(title: str, series: Mapping[str, Sequence[Point]]) -> str:
    """The SVG text."""
    points = [point for each in series.values() for point in each]
    low, high = _power_of_two_range([point.bytes for point in points])
    most = max(110.0, 10 * math.ceil(max(point.percent for point in points) / 10))
    across = _Scale(math.log2(low), math.log2(high), LEFT, WIDTH - RIGHT)
    up = _Scale(0, most, HEIGHT - BOTTOM, TOP)
    parts = [*_frame(title, across, up, most)]
    for number, (name, each) in enumerate(series.items()):
        colour, shape = STYLES[number % len(STYLES)]
        for point in each:
            x, y = across(math.log2(point.bytes)), up(point.percent)
            label = f"{name} · {point.name} · {format_bytes(point.bytes)} · {point.percent:.0f}%"
            parts.append(_marker(shape, x, y, colour, label))
        y = TOP + 14 + 24 * number
        parts.append(_marker(shape, WIDTH - RIGHT + 22, y, colour, name))
        parts.append(_text(WIDTH - RIGHT + 36, y + 4, name))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="13">'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def format_bytes(size: float) -> str:
    for unit, name in UNITS:
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"


@dataclass(frozen=True)
class _Scale:
    """Linear map from [low, high] to [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)


def _power_of_two_range(sizes: Sequence[float]) -> tuple[float, float]:
    """The powers of two that enclose all sizes."""
    return 2 ** math.floor(math.log2(min(sizes))), 2 ** (math.floor(math.log2(max(sizes))) + 1)


def _frame(title: str, across: _Scale, up: _Scale, most: float) -> list[str]:
    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="26" font-size="16" fill="#222">{html.escape(title)}</text>',
    ]
    step = 20
    for percent in range(0, int(most) + 1, step):
        y = up(percent)
        colour = "#222" if percent == 100 else "#e4e4e4"
        parts.append(
            f'<line x1="{across.start}" x2="{across.end}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}"/>'
        )
        parts.append(_text(LEFT - 10, y + 4, f"{percent}%", "end"))
    first, last = round(across.low), round(across.high)
    for power in range(first, last + 1, max(1, (last - first) // 8)):
        x = across(power)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{up.start}" y2="{up.start + 5}" stroke="#222"/>'
        )
        parts.append(_text(x, up.start + 22, format_bytes(2.0**power), "middle"))
    middle = (across.start + across.end) / 2
    parts.append(_text(middle, HEIGHT - 10, "bytes that must move", "middle"))
    return parts


def _marker(shape: str, x: float, y: float, colour: str, label: str) -> str:
    title = f"<title>{html.escape(label)}</title>"
    fill = "none" if shape in ("ring", "frame") else colour
    if shape in ("circle", "ring"):
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{fill}" stroke="{colour}">{title}</circle>'
    turn = f' transform="rotate(45 {x:.1f} {y:.1f})"' if shape == "diamond" else ""
    return (
        f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{fill}" '
        f'stroke="{colour}"{turn}>{title}</rect>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#444">{html.escape(text)}</text>'
