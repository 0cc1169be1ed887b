"""The report: one page that needs nothing else, from whatever a run has left."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fulgurite.errors import ArgumentError
from fulgurite.train.charts import (
    MAX_POINTS,
    Curve,
    draw_curves,
    draw_heat_map,
    format_number,
    nice_ticks,
    smooth,
    thin,
)
from fulgurite.train.config import LogSection
from fulgurite.train.metrics import MetricsWriter, StepRecord
from fulgurite.train.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
VOID = {"meta", "input", "br", "hr", "col"}


class Checker(HTMLParser):
    """Collects texts, and checks that elements are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def check(path: Path) -> str:
    """The page's text."""
    page = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(page)
    assert not checker.open and "<script" not in page and "http" not in page
    assert not re.search(r"nan|inf\b", "".join(re.findall(r'points="[^"]*"', page)))
    for svg in re.findall(r"<svg.*?</svg>", page, re.S):
        ElementTree.fromstring(svg)
    return " ".join(checker.texts)


def write_run(folder: Path, steps: int, **fields: object) -> Path:
    writer = MetricsWriter(folder, LogSection())
    for step in range(steps):
        values = {name: make(step) for name, make in fields.items()}  # type: ignore[operator]
        defaults = {"time": float(step), "loss": 5 / (step + 1)}
        writer.write(StepRecord(step=step, **{**defaults, **values}))
    writer.close()
    return folder


def full_run(folder: Path) -> Path:
    write_run(
        folder,
        600,
        loss=lambda s: math.nan if s == 7 else 3 + 5 * math.exp(-s / 50),
        is_skipped=lambda s: s == 7,
        tokens=lambda s: 100 * (s + 1),
        tokens_per_second=lambda s: None if s == 0 else 1000.0 + s,
        mfu=lambda s: 0.4,
        bits_per_byte=lambda s: 2.0,
        memory_bytes=lambda s: 3 << 29,
        gradient_norm=lambda s: math.inf if s == 7 else 1.0,
        expert_load=lambda s: [[0.0, 1.0, 2.0], [0.9, 1.1, 1.0]],
        expert_min=lambda s: 0.0,
        expert_max=lambda s: 2.0,
        evaluation=lambda s: {"loss": 3.25, "bits_per_byte": 1.5} if s % 100 == 99 else {},
    )
    (folder / "config.toml").write_text('name = "</pre><b>x"')
    receipt = {"data": {"tokens": "ab" * 32}, "code": "cd" * 32, "losses": {"0": "0x1p+1"}}
    (folder / "receipt.json").write_text(json.dumps(receipt))
    return folder


def test_a_whole_run(tmp_path: Path):
    folder = full_run(tmp_path / "my <run>")
    text = check(write_report(folder, sample="The <i>sky</i> & sea"))
    for part in (
        "my <run>",
        "600 steps · 60k tokens · 9:59 · 1 step skipped",
        "3.250",
        "1.500",
        "40.0%",
        "1.5 GiB",
        "0.00–2.00×",
        "Load at step 600",
        "layer 0, expert 2: 2.00×",
        "not finite in steps 8.",
        "The <i>sky</i> & sea",
        'name = "</pre><b>x"',
        "ab" * 32,
        "Gradient norm",
    ):
        assert part in text, part


def test_rewards_have_figures_and_curves(tmp_path: Path):
    folder = write_run(tmp_path, 30, task=lambda s: {"reward": s / 29, "reward_std": 0.25})
    text = check(write_report(folder))
    assert "Reward std" in text and "reward 1 " in text.replace("\n", " ")


def test_the_time_of_a_resumed_run_is_that_of_all_parts(tmp_path: Path):
    folder = write_run(tmp_path, 300, time=lambda s: float(s % 100 + 1))  # two restarts
    assert "300 steps · 0 tokens · 5:00" in check(write_report(folder))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_of_few_steps_with_nothing_else(tmp_path: Path, steps: int):
    text = check(write_report(write_run(tmp_path, steps)))
    assert "Experts" not in text and "Validation" not in text and "Receipt" not in text


def test_a_run_that_had_no_finite_loss(tmp_path: Path):
    text = check(
        write_report(write_run(tmp_path, 30, loss=lambda s: math.nan, is_skipped=lambda s: True))
    )
    assert "and 10 more" in text and "30 steps skipped" in text


def test_damaged_files_are_left_out(tmp_path: Path):
    write_run(tmp_path, 2)
    (tmp_path / "receipt.json").write_text("{broken")
    (tmp_path / "config.toml").write_bytes(b"\xff")
    check(write_report(tmp_path))
    (tmp_path / "receipt.json").write_text("[]")
    check(write_report(tmp_path))


def test_a_folder_without_metrics(tmp_path: Path):
    with pytest.raises(ArgumentError, match="no metrics"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_long_runs_make_no_large_pages(tmp_path: Path):
    page = write_report(write_run(tmp_path, 20_000, gradient_norm=lambda s: s % 7))
    assert page.stat().st_size < 400_000
    check(page)


# ---- charts --------------------------------------------------------------------------------------


def test_thinning_keeps_the_extremes():
    points = [(float(x), 9.0 if x == 1234 else 0.0) for x in range(5000)]
    kept, bands = thin(points)
    assert len(kept) == len(bands) == MAX_POINTS and max(band.high for band in bands) == 9
    assert thin(points[:5]) == (points[:5], [])
    assert thin([(0, math.nan), (1, math.inf), (2, 5.0)]) == ([(2, 5.0)], [])


def test_smoothing_has_no_lag_and_keeps_the_mean():
    line = [(float(x), 3.0 * x) for x in range(1000)]
    assert [y for _, y in smooth(line)] == pytest.approx([y for _, y in line])
    assert smooth([]) == [] and smooth([(1, 2.0)]) == [(1, 2.0)]
    noisy = [(float(x), float((-1) ** x)) for x in range(1000)]
    assert max(abs(y) for _, y in smooth(noisy)[20:-20]) < 0.2


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 1e-9), (-5, 1234567), (0.001, 0.0013), (2, 2), (0, math.nan)]
)
def test_ticks_are_few_and_inside(low: float, high: float):
    ticks = nice_ticks(low, high)
    assert len(ticks) <= 7
    if high > low:
        assert len(ticks) >= 2
        span = high - low
        assert all(low - 1e-6 * span <= tick <= high + 1e-6 * span for tick in ticks)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (9480, "9480"),
        (12_345, "12.3k"),
        (4.92e6, "4.92M"),
        (3e-5, "3e-05"),
        (-2.5, "-2.5"),
    ],
)
def test_numbers(value: float, text: str):
    assert format_number(value) == text


def test_charts_of_nothing():
    assert draw_curves("x", [Curve("a", [])]) == "" and draw_heat_map("x", [], "") == ""
    assert draw_heat_map("x", [[]], "") == ""
    one = draw_curves("x", [Curve("a", [(5, 1.0)])])
    ElementTree.fromstring(str(one))


# ---- in a browser --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_page_has_no_sideways_scrolling_in_chromium(tmp_path: Path):
    """The page is laid out at 360 px; a copy with a script writes what it measured into the title."""
    page = write_report(full_run(tmp_path)).read_text()
    probe = (
        "<script>addEventListener('load', () => { const e = document.scrollingElement;"
        " document.title = 'measured ' + e.scrollWidth + ' ' + innerWidth; })</script>"
    )
    (tmp_path / "probe.html").write_text(page.replace("</body>", probe + "</body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=360,800", "--dump-dom"]
    command = [str(CHROMIUM), *flags, (tmp_path / "probe.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r"measured (\d+) (\d+)", dom)
    assert found is not None and int(found[1]) <= int(found[2])
