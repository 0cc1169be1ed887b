"""The report of a run: its folder in, `report.html` out.

One HTML file with inline SVG and styles, no script, no request to another host, light and dark. It shows
the figures of the run, curves over steps, the load of experts, evaluations, the config and the receipt.
It is written at the end of a run, and may be written at any time from what is there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from fulgurite.errors import ArgumentError
from fulgurite.files import write_atomically
from fulgurite.report.markup import Markup, join_markup, make_element
from fulgurite.train.charts import Curve, Point, draw_curves, draw_heat_map, format_number, smooth
from fulgurite.train.metrics import StepRecord, read_metrics
from fulgurite.train.view import format_bytes, format_duration, name_figure
from fulgurite.version import VERSION

FILE = "report.html"
CONFIG_FILE, RECEIPT_FILE, EXPLANATION_FILE = "config.toml", "receipt.json", "explain.txt"
MAX_SKIPPED = 20  # skipped steps that are listed


def write_report(folder: Path, sample: str | None = None) -> Path:
    """Write `report.html` of a run; `sample`: text that the model wrote."""
    records = read_metrics(folder)
    if not records:
        raise ArgumentError(
            f"there are no metrics in {folder}",
            next="name the folder of a run with a metrics.jsonl",
        )
    return write_atomically(folder / FILE, render_report(folder, records, sample))


def render_report(folder: Path, records: Sequence[StepRecord], sample: str | None = None) -> str:
    """The HTML text."""
    receipt = _read_receipt(folder / RECEIPT_FILE)
    sections = [
        make_element("p", "fulgurite train", class_="brand"),
        make_element("h1", folder.resolve().name),
        make_element("p", _describe(records), class_="quiet"),
        _make_figures(records),
        make_element("div", *_make_charts(records), class_="charts"),
        _make_experts(records),
        _make_evaluations(records),
        _make_sample(sample),
        _make_skipped(records),
        _make_text("Config", folder / CONFIG_FILE),
        _make_text("Compiled step", folder / EXPLANATION_FILE),
        _make_receipt(receipt),
    ]
    style = resources.files("fulgurite.train").joinpath("report.css").read_text(encoding="utf-8")
    head = make_element(
        "head",
        make_element("meta", charset="utf-8"),
        make_element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        make_element("meta", name="generator", content=f"fulgurite {VERSION}"),
        make_element("title", f"{folder.resolve().name}: fulgurite train"),
        make_element("style", Markup(style)),
    )
    body = make_element("body", make_element("main", *sections))
    return f"<!doctype html>\n{make_element('html', head, body, lang='en')}\n"


# ---- figures -------------------------------------------------------------------------------------


def _describe(records: Sequence[StepRecord]) -> str:
    last = records[-1]
    skipped = sum(record.is_skipped for record in records)
    parts = [
        f"{last.step + 1:,} steps",
        f"{format_number(last.tokens)} tokens",
        format_duration(_total_time(records)),
    ]
    if skipped:
        parts.append("1 step skipped" if skipped == 1 else f"{skipped} steps skipped")
    return " · ".join(parts)


def _total_time(records: Sequence[StepRecord]) -> float:
    """Seconds of all parts of a run: the clock of a resumed part starts at zero."""
    ends = [one.time for one, after in pairwise(records) if after.time < one.time]
    return sum(ends) + records[-1].time


def _make_figures(records: Sequence[StepRecord]) -> Markup:
    """The last values, as a list of cards."""
    last = records[-1]
    evaluation = next((one.evaluation for one in reversed(records) if one.evaluation), {})
    rates = [one.tokens_per_second for one in records if one.tokens_per_second is not None]
    mfus = [one.mfu for one in records if one.mfu is not None]
    bits = evaluation.get("bits_per_byte", last.bits_per_byte)
    figures = {
        "loss": f"{_last_loss(records):.3f}",
        "validation loss": f"{evaluation['loss']:.3f}" if "loss" in evaluation else None,
        "bits per byte": f"{bits:.3f}" if bits is not None else None,
        **{name_figure(name): f"{value:.3g}" for name, value in last.task.items()},
        "tokens per second": f"{_median(rates):,.0f}" if rates else None,
        "MFU": f"{_median(mfus):.1%}" if mfus else None,
        "experts, least–most": _format_range(last.expert_min, last.expert_max),
        "peak memory": format_bytes(max(record.memory_bytes for record in records)),
    }
    cards = [
        make_element("div", make_element("dt", name), make_element("dd", value))
        for name, value in figures.items()
        if value is not None
    ]
    return make_element("dl", *cards)


def _last_loss(records: Sequence[StepRecord]) -> float:
    """The mean of the last 2% of steps."""
    losses = [one.loss for one in records if math.isfinite(one.loss)]
    last = losses[-max(1, len(losses) // 50) :]
    return sum(last) / len(last) if last else math.nan


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _format_range(low: float | None, high: float | None) -> str | None:
    return None if low is None or high is None else f"{low:.2f}–{high:.2f}×"


# ---- curves --------------------------------------------------------------------------------------


def _points(
    records: Sequence[StepRecord], read: Callable[[StepRecord], float | None]
) -> list[Point]:
    """Steps and values; those that are not there or not finite are left out."""
    found = ((record.step, read(record)) for record in records)
    return [(step, value) for step, value in found if value is not None and math.isfinite(value)]


def _make_charts(records: Sequence[StepRecord]) -> list[Markup]:
    losses = _points(records, lambda one: one.loss)
    bits = _points(records, lambda one: one.bits_per_byte)
    charts = [
        draw_curves(
            "Loss",
            [
                Curve("each step", losses, style=0),
                Curve("train", smooth(losses)),
                _evaluation_curve(records, "loss"),
            ],
        ),
        draw_curves(
            "Bits per byte",
            [Curve("train", smooth(bits)), _evaluation_curve(records, "bits_per_byte")],
        ),
        *_make_task_charts(records),
        _chart(records, "Tokens per second", lambda one: one.tokens_per_second, from_zero=True),
        _chart(records, "MFU, %", lambda one: one.mfu and 100 * one.mfu, from_zero=True),
        _chart(records, "Learning rate", lambda one: one.learning_rate, from_zero=True),
        _chart(records, "Gradient norm", lambda one: one.gradient_norm, from_zero=True),
        _chart(records, "Peak memory, GiB", lambda one: one.memory_bytes / 2**30, from_zero=True),
    ]
    return [chart for chart in charts if chart]


def _make_task_charts(records: Sequence[StepRecord]) -> list[Markup]:
    """Figures of fine-tuning, such as the rewards of GRPO."""
    charts = []
    for name in dict.fromkeys(name for record in records for name in record.task):
        points = _points(records, lambda one, name=name: one.task.get(name))  # type: ignore[misc]
        curves = [Curve("each step", points, style=0), Curve("mean", smooth(points))]
        charts.append(draw_curves(name_figure(name).capitalize(), curves))
    return charts


def _chart(
    records: Sequence[StepRecord],
    title: str,
    read: Callable[[StepRecord], float | None],
    from_zero: bool,
) -> Markup:
    return draw_curves(title, [Curve("last", _points(records, read))], from_zero=from_zero)


def _evaluation_curve(records: Sequence[StepRecord], name: str) -> Curve:
    points = _points(records, lambda one: one.evaluation.get(name))
    return Curve("validation", points, style=2, has_dots=True)


def _make_experts(records: Sequence[StepRecord]) -> Markup:
    """Load over steps, and a map of layers and experts from the last record that has one."""
    loads = [record for record in records if record.expert_load]
    if not loads:
        return Markup("")
    curves = draw_curves(
        "Load to the mean of the layer, ×",
        [
            Curve("most loaded expert", _points(records, lambda one: one.expert_max)),
            Curve("least loaded", _points(records, lambda one: one.expert_min), style=2),
        ],
        from_zero=True,
    )
    last = loads[-1]
    heat = draw_heat_map(
        f"Load at step {last.step + 1:,}",
        last.expert_load or [],
        "rows: layers, columns: experts; blue: below the mean, orange: above",
    )
    charts = make_element("div", curves, heat, class_="charts")
    return join_markup([make_element("h2", "Experts"), charts])


# ---- tables --------------------------------------------------------------------------------------


def _make_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Markup:
    """The first column is text, the others are numbers."""

    def cell(tag: str, place: int, value: object) -> Markup:
        return make_element(tag, value, class_="number" if place else None)

    top = make_element("tr", *(cell("th", place, name) for place, name in enumerate(head)))
    body = [
        make_element("tr", *(cell("td", i, value) for i, value in enumerate(row))) for row in rows
    ]
    return make_element("div", make_element("table", top, *body), class_="scroll")


def _make_evaluations(records: Sequence[StepRecord]) -> Markup:
    found = [record for record in records if record.evaluation]
    if not found:
        return Markup("")
    names = list(dict.fromkeys(name for record in found for name in record.evaluation))
    rows = [
        [f"{record.step + 1:,}", *(_format_value(record.evaluation.get(name)) for name in names)]
        for record in found
    ]
    table = _make_table(["after step", *(name.replace("_", " ") for name in names)], rows)
    return join_markup([make_element("h2", "Validation"), table])


def _format_value(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if abs(value) < 1e4 else format_number(value)


def _make_skipped(records: Sequence[StepRecord]) -> Markup:
    skipped = [record.step for record in records if record.is_skipped]
    if not skipped:
        return Markup("")
    named = ", ".join(f"{step + 1:,}" for step in skipped[:MAX_SKIPPED])
    more = "" if len(skipped) <= MAX_SKIPPED else f" and {len(skipped) - MAX_SKIPPED} more"
    text = f"A loss or gradient was not finite in steps {named}{more}. Weights did not change."
    return join_markup([make_element("h2", "Skipped steps"), make_element("p", text, class_="bad")])


def _make_sample(sample: str | None) -> Markup:
    if not sample:
        return Markup("")
    return join_markup([make_element("h2", "Sample"), make_element("pre", sample)])


def _make_text(title: str, path: Path) -> Markup:
    """A text file of the run, folded; nothing if there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return Markup("")
    shown = make_element("details", make_element("summary", path.name), make_element("pre", text))
    return join_markup([make_element("h2", title), shown])


def _read_receipt(path: Path) -> dict[str, Any]:
    """The receipt; empty if there is none or it is not whole."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _make_receipt(receipt: dict[str, Any]) -> Markup:
    """Hashes of data, code and checkpoints, and the environment."""
    rows = []
    for name in ("data", "code", "environment", "checkpoints", "chain"):
        value = receipt.get(name)
        entries = value.items() if isinstance(value, dict) else [("", value)]
        rows += [(f"{name} {key}".strip(), one) for key, one in entries if one is not None]
    if not rows:
        return Markup("")
    lines = [
        make_element(
            "tr",
            make_element("td", name),
            make_element("td", make_element("code", value), class_="wrap"),
        )
        for name, value in rows
    ]
    table = make_element("div", make_element("table", *lines), class_="scroll")
    return join_markup([make_element("h2", "Receipt"), table])
