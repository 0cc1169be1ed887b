"""What a terminal shows of a run: records in, a live view or plain lines out.

    view = make_view(config.log, steps)
    view.start("small-moe · 11.2M parameters, 3.4M a token · ...")
    view.step(record, seconds_left)
    view.event("saved", "runs/small-moe/checkpoints/step-000400 in 0.06 s")
    view.close()

In a terminal the last lines are live: progress, figures, the loss so far and the load of experts. Elsewhere
(a file, a pipe, CI) the same figures are plain lines, at most one in some seconds.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fulgurite.train.config import LogSection
from fulgurite.train.metrics import StepRecord

BLOCKS = "▁▂▃▄▅▆▇█"
ACCENT, QUIET, BAD = "dark_orange", "bright_black", "red"
BAR_WIDTH = 24
CURVE_WIDTH = 48
MAX_LAYERS, MAX_EXPERTS = 8, 64  # that the live view draws
PLAIN_SECONDS = 5.0  # between plain lines


class View(Protocol):
    """What a trainer tells a view."""

    def start(self, headline: str) -> None: ...

    def step(self, record: StepRecord, seconds_left: float | None = None) -> None: ...

    def event(self, label: str, text: str) -> None: ...

    def close(self) -> None: ...


def make_view(section: LogSection, steps: int, stream: TextIO | None = None) -> View:
    """The view of a run of `steps` steps; `log.live` None: live if the stream is a terminal."""
    stream = sys.stdout if stream is None else stream
    console = Console(file=stream, highlight=False)
    is_live = console.is_terminal if section.live is None else section.live
    if is_live and not console.is_dumb_terminal:
        return LiveView(console, steps)
    return PlainView(stream, steps)


# ---- figures -------------------------------------------------------------------------------------


def format_figures(record: StepRecord, seconds_left: float | None = None) -> list[str]:
    """The figures of a step, in the order of reading."""
    parts = [f"loss {record.loss:.3f}" + (" skipped: not finite" if record.is_skipped else "")]
    if record.bits_per_byte is not None:
        parts.append(f"{record.bits_per_byte:.3f} bits/byte")
    parts += [f"{name_figure(name)} {value:.3g}" for name, value in record.task.items()]
    if record.tokens_per_second is not None:
        parts.append(f"{record.tokens_per_second:,.0f} tokens/s")
    if record.mfu is not None:
        parts.append(
            f"{record.mfu:.1%} of peak" if record.mfu < 0.1 else f"{record.mfu:.0%} of peak"
        )
    if record.expert_min is not None and record.expert_max is not None:
        parts.append(f"experts {record.expert_min:.1f}–{record.expert_max:.1f}×")
    if record.memory_bytes:
        parts.append(format_bytes(record.memory_bytes))
    if record.evaluation:
        parts += [f"validation {_format_evaluation(record.evaluation)}"]
    if seconds_left is not None:
        parts.append(f"{format_duration(seconds_left)} left")
    return parts


def name_figure(name: str) -> str:
    """The name of a figure in words: `reward_std`, `reward std`."""
    return name.replace("_", " ")


def _format_evaluation(values: dict[str, float]) -> str:
    bits = values.get("bits_per_byte")
    loss = values.get("loss", math.nan)
    return f"{loss:.3f}" if bits is None else f"{loss:.3f} ({bits:.3f} bits/byte)"


def format_bytes(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}" if unit == "GiB" else f"{count / size:.0f} {unit}"
    return f"{count / 1024:.0f} KiB"


def format_duration(seconds: float) -> str:
    """`2:41`, `1:02:03`, `3d 4:05:06`."""
    if not math.isfinite(seconds):
        return "?"
    total = max(0, round(seconds))
    days, rest = divmod(total, 86_400)
    hours, rest = divmod(rest, 3600)
    clock = f"{rest // 60:02d}:{rest % 60:02d}"
    if days:
        return f"{days}d {hours}:{clock}"
    return f"{hours}:{clock}" if hours else clock.removeprefix("0")


def format_progress(step: int, steps: int) -> str:
    """`step   400/1200`; the step has just ended."""
    width = len(str(steps))
    return f"step {step + 1:>{width}}/{steps}"


def draw_curve(values: Sequence[float], width: int = CURVE_WIDTH) -> str:
    """Values as blocks, the mean of neighbours where there are more than `width`."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    edges = [place * len(finite) // count for place in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def draw_load(row: Sequence[float]) -> str:
    """The load of a layer's experts as blocks: 1× is in the middle, 2× and more is full."""
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[min(top, max(0, round(value / 2 * top)))] for value in row[:MAX_EXPERTS])


# ---- views ---------------------------------------------------------------------------------------


class PlainView:
    """One line a step, at most one in `PLAIN_SECONDS`; the first, the last and news always."""

    def __init__(
        self, stream: TextIO, steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stream = stream
        self.steps = steps
        self._clock = clock
        self._last: float | None = None

    def start(self, headline: str) -> None:
        self._print(headline)

    def step(self, record: StepRecord, seconds_left: float | None = None) -> None:
        now = self._clock()
        is_due = self._last is None or now - self._last >= PLAIN_SECONDS
        has_news = record.is_skipped or record.evaluation or record.step + 1 >= self.steps
        if is_due or has_news:
            self._last = now
            figures = " · ".join(format_figures(record, seconds_left))
            self._print(f"{format_progress(record.step, self.steps)}   {figures}")

    def event(self, label: str, text: str) -> None:
        self._print(f"{label:<6} {text}")

    def close(self) -> None:
        """Nothing is open."""

    def _print(self, line: str) -> None:
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        print(line.encode(encoding, "replace").decode(encoding), file=self.stream, flush=True)


class Waiting:
    """A line with the seconds since it was made; a live view draws it again and again."""

    def __init__(self, text: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.text, self._clock, self._start = text, clock, clock()

    def __rich__(self) -> Text:
        line = f"{self.text}   {self._clock() - self._start:.0f} s"
        return Text(line, style=QUIET, no_wrap=True, overflow="ellipsis")


class LiveView:
    """Lines that are drawn again at every step, with events above them."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.steps = steps
        self._losses: list[float] = []
        self._load: list[list[float]] | None = None
        self._validation = ""
        self._live: Live | None = None

    def start(self, headline: str) -> None:
        self.console.print(Text(headline, style="bold"))
        waiting = Waiting("waiting for the first step, which compiles kernels")
        self._live = Live(waiting, console=self.console, refresh_per_second=8, transient=False)
        self._live.start()

    def step(self, record: StepRecord, seconds_left: float | None = None) -> None:
        self._losses.append(record.loss)
        self._load = record.expert_load or self._load
        if record.evaluation:
            self._validation = _format_evaluation(record.evaluation)
        if self._live is not None:
            self._live.update(self.render(record, seconds_left))

    def event(self, label: str, text: str) -> None:
        line = Text.assemble((f"{label:<6} ", ACCENT), text)
        self.console.print(line)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def render(self, record: StepRecord, seconds_left: float | None) -> Group:
        """The live lines."""
        lines = [self._progress_line(record, seconds_left), self._figures_line(record)]
        curve = Text.assemble(("loss   ", QUIET), (draw_curve(self._losses), ACCENT))
        if self._validation:
            curve.append(f"   validation {self._validation}")
        lines.append(curve)
        for layer, row in enumerate((self._load or [])[:MAX_LAYERS]):
            label = "experts" if layer == 0 else " " * 7
            lines.append(Text.assemble((f"{label} ", QUIET), (draw_load(row), ACCENT)))
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines)

    def _progress_line(self, record: StepRecord, seconds_left: float | None) -> Text:
        share = min(1.0, (record.step + 1) / max(1, self.steps))
        done = round(share * BAR_WIDTH)
        left = "" if seconds_left is None else f"   {format_duration(seconds_left)} left"
        return Text.assemble(
            f"{format_progress(record.step, self.steps)} ",
            ("━" * done, ACCENT),
            ("─" * (BAR_WIDTH - done), QUIET),
            f" {share:4.0%}",
            (left, QUIET),
        )

    def _figures_line(self, record: StepRecord) -> Text:
        line = Text()
        for place, part in enumerate(format_figures(record)):
            line.append(" · " if place else "", style=QUIET)
            line.append(part, style=BAD if record.is_skipped and place == 0 else "")
        return line
