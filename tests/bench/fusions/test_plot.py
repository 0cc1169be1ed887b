"""The image of percent against bytes: well-formed, every point where it belongs."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from fulgurite.bench.fusions.plot import Point, draw_plot, format_bytes
from fulgurite.bench.fusions.report import plot_bandwidth

SVG = "{http://www.w3.org/2000/svg}"


def markers(image: str, shape: str) -> list[ElementTree.Element]:
    return [e for e in ElementTree.fromstring(image).iter(SVG + shape) if len(e)]


def test_every_point_has_a_marker_with_its_name():
    points = [Point("a<b", 1 << 20, 50.0), Point("c", 1 << 24, 100.0)]
    found = markers(draw_plot("x & y", {"ours": points}), "circle")
    titles = [marker[0].text for marker in found]
    assert titles == ["ours · a<b · 1 MiB · 50%", "ours · c · 16 MiB · 100%", "ours"]


def test_more_is_higher_and_larger_is_further_right():
    points = [Point("low", 1 << 20, 20.0), Point("high", 1 << 24, 90.0)]
    low, high, _ = markers(draw_plot("", {"ours": points}), "circle")
    assert float(low.get("cy")) > float(high.get("cy"))
    assert float(low.get("cx")) < float(high.get("cx"))


def test_rows_of_the_suite_may_lack_candidates():
    rows = [
        {"group": "sizes", "case": "a", "bytes": 1e6, "fulgurite_percent": 91.0},
        {"group": "forward", "case": "b", "bytes": 1e8, "fulgurite_percent": 99.0, "eager_percent": 9.0},
    ]  # fmt: skip
    image = plot_bandwidth(rows)
    assert "torch.compile" not in image
    assert len(markers(image, "circle")) == 3 and len(markers(image, "rect")) == 2


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1, "1 B"), (1536, "1.5 KiB"), (3 << 30, "3 GiB")]
)
def test_sizes(size, text):
    assert format_bytes(size) == text


def test_five_candidates_look_different():
    series = {name: [Point("p", 1 << 20, 50.0)] for name in "abcde"}
    image = draw_plot("", series)
    found = [*markers(image, "circle"), *markers(image, "rect")]
    looks = {(m.tag, m.get("fill"), m.get("stroke"), m.get("transform") is None) for m in found}
    assert len(looks) == 5 and len(found) == 10
