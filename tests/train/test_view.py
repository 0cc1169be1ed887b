"""The view: a live one in a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import math
import re

import pytest
from rich.console import Console

from fulgurite.train.config import LogSection
from fulgurite.train.metrics import StepRecord
from fulgurite.train.view import (
    LiveView,
    PlainView,
    Waiting,
    draw_curve,
    draw_load,
    format_bytes,
    format_duration,
    format_figures,
    make_view,
)

RECORD = StepRecord(
    step=399,
    time=80.0,
    loss=3.12,
    bits_per_byte=1.61,
    tokens_per_second=9480.4,
    mfu=0.38,
    memory_bytes=412 << 20,
    expert_min=0.9,
    expert_max=1.2,
    expert_load=[[0.9, 1.2, 1.0, 0.9], [1.0, 1.0, 1.0, 1.0]],
)


def test_figures_in_one_line():
    assert " · ".join(format_figures(RECORD, 161)) == (
        "loss 3.120 · 1.610 bits/byte · 9,480 tokens/s · 38% of peak · experts 0.9–1.2× · 412 MiB"
        " · 2:41 left"
    )


def test_figures_that_are_not_known_are_left_out():
    assert format_figures(StepRecord(0, 0.0, 7.5)) == ["loss 7.500"]
    skipped = StepRecord(0, 0.0, math.nan, is_skipped=True)
    assert format_figures(skipped) == ["loss nan skipped: not finite"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (-1, "0:00"),
        (59.6, "1:00"),
        (161, "2:41"),
        (3723, "1:02:03"),
        (90_061, "1d 1:01:01"),
        (math.inf, "?"),
        (math.nan, "?"),
    ],
)
def test_durations(seconds: float, text: str):
    assert format_duration(seconds) == text


def test_sizes():
    assert [format_bytes(n) for n in (2048, 5 << 20, 3 << 29)] == ["2 KiB", "5 MiB", "1.5 GiB"]


def test_curves_and_loads_as_blocks():
    assert draw_curve([]) == draw_curve([math.nan]) == ""
    assert draw_curve([1, 1, 1]) == "▁▁▁"
    assert draw_curve([0, math.inf, 7]) == "▁█"
    assert draw_curve(range(1000), width=8) == "▁▂▃▄▅▆▇█"
    assert draw_load([0, 1, 2, 9]) == "▁▅██"


def test_a_file_gets_plain_lines():
    stream = io.StringIO()
    view = make_view(LogSection(), 1200, stream)
    assert isinstance(view, PlainView)
    view.start("small-moe · 11.2M parameters")
    view.step(RECORD, 161)
    view.event("saved", "runs/x in 0.06 s")
    view.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "small-moe · 11.2M parameters"
    assert lines[1].startswith("step  400/1200   loss 3.120 · ") and lines[1].endswith("2:41 left")
    assert lines[2] == "saved  runs/x in 0.06 s"
    assert "\x1b" not in stream.getvalue()


def test_plain_lines_are_not_many():
    stream, now = io.StringIO(), [0.0]
    view = PlainView(stream, 100, clock=lambda: now[0])
    for step in range(100):
        now[0] += 0.25
        view.step(StepRecord(step, now[0], 1.0, is_skipped=step == 31))
    steps = [line.split("/")[0].split()[-1] for line in stream.getvalue().splitlines()]
    assert steps == ["1", "21", "32", "52", "72", "92", "100"]


def test_a_stream_of_another_encoding_is_no_error():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    view = PlainView(stream, 10)
    view.step(RECORD)
    stream.flush()
    assert b"loss 3.120 ? 1.610" in stream.buffer.getvalue()


def draw(width: int, *records: StepRecord) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, color_system=None)
    view = LiveView(console, 1200)
    view.start("headline")
    for record in records:
        view.step(record, 161)
    view.event("saved", "[bold]runs/x[/bold]")
    view.close()
    view.close()
    return stream.getvalue()


def test_the_live_view_shows_progress_and_experts():
    text = draw(100, RECORD)
    assert "headline" in text and "step  400/1200 ━━━━━━━━────────────────  33%   2:41 left" in text
    assert "9,480 tokens/s" in text and "experts " in text
    assert "saved  [bold]runs/x[/bold]" in text  # text is not markup


def test_the_live_view_counts_seconds_until_the_first_step():
    now = [5.0]
    waiting = Waiting("waiting for the first step", clock=lambda: now[0])
    now[0] += 41.2
    assert str(waiting.__rich__()) == "waiting for the first step   41 s"
    assert "waiting for the first step" in draw(100)


@pytest.mark.parametrize("width", [20, 40, 200])
def test_no_line_is_wider_than_the_terminal(width: int):
    records = [StepRecord(step, 1.0, 5.0 / (step + 1)) for step in range(300)]
    large = StepRecord(300, 1.0, math.nan, expert_load=[[1.0] * 512] * 99, is_skipped=True)
    text = draw(width, *records, large)
    for line in text.replace("\r", "\n").split("\n"):
        visible = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)
        assert len(visible) <= max(width, 30), visible


@pytest.mark.parametrize(("live", "kind"), [(True, LiveView), (False, PlainView)])
def test_the_config_decides(live: bool, kind: type, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_view(LogSection(live=live), 5, io.StringIO()), kind)
