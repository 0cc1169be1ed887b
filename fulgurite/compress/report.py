"""The quality of a quantized checkpoint beside its original: a table, or JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

WORST_WEIGHTS = 5


@dataclass(frozen=True)
class WeightQuality:
    """Signal-to-quantization-noise ratios (SQNR) of one weight, in dB.

    `output_db` is that of its outputs on the calibration text; None if not calibrated.
    """

    name: str
    shape: tuple[int, ...]
    weight_db: float
    output_db: float | None = None

    @property
    def rank(self) -> float:
        return self.weight_db if self.output_db is None else self.output_db


@dataclass(frozen=True)
class QualityReport:
    """Sizes, perplexities and SQNRs.

    Attributes:
        scheme: the format's name.
        num_weights: elements of the quantized weights.
        weight_bits: bits that they take, scales included.
        weights: every quantized weight.
        ignored: linears that stayed dense, and why.
        perplexity_before: of the original; None if not measured.
        perplexity_after: of the quantized model.
        eval_tokens: tokens of the text for perplexity.
        calibration_tokens: tokens of the calibration text; 0 if not calibrated.
        bytes_before: of the original's weights on disk.
        bytes_after: of the quantized weights on disk.
    """

    scheme: str
    num_weights: int
    weight_bits: int
    weights: tuple[WeightQuality, ...]
    ignored: Mapping[str, str]
    perplexity_before: float | None
    perplexity_after: float | None
    eval_tokens: int
    calibration_tokens: int
    bytes_before: int = 0
    bytes_after: int = 0

    @property
    def bits_per_weight(self) -> float:
        return self.weight_bits / max(1, self.num_weights)

    def with_sizes(self, before: int, after: int) -> QualityReport:
        return replace(self, bytes_before=before, bytes_after=after)

    def to_json(self) -> dict[str, object]:
        """Plain values; an infinite SQNR becomes None."""
        values = asdict(self) | {"bits_per_weight": self.bits_per_weight}
        for weight in values["weights"]:
            for key in ("weight_db", "output_db"):
                if weight[key] is not None and not math.isfinite(weight[key]):
                    weight[key] = None
        return values

    def render(self, eval_name: str) -> RenderableType:
        """Two tables: original beside quantized, and the weights with the lowest SQNR."""
        return Group(self._render_totals(eval_name), "", self._render_worst())

    def _render_totals(self, eval_name: str) -> Table:
        table = Table(box=None, pad_edge=False)
        for title in ("", "original", self.scheme, ""):
            table.add_column(title, justify="left" if not title else "right")
        ratio = self.bytes_before / max(1, self.bytes_after)
        change = f"{ratio:.2f}× smaller" if ratio >= 1 else f"{1 / max(ratio, 1e-9):.2f}× larger"
        sizes = (format_size(size) for size in (self.bytes_before, self.bytes_after))
        table.add_row("size on disk", *sizes, change)
        table.add_row("bits per weight", "", f"{self.bits_per_weight:.2f}", "of quantized linears")
        if self.perplexity_before is not None and self.perplexity_after is not None:
            percent = 100 * (self.perplexity_after / self.perplexity_before - 1)
            table.add_row(
                "perplexity",
                f"{self.perplexity_before:.3f}",
                f"{self.perplexity_after:.3f}",
                f"{percent:+.2f}%",
            )
            table.caption = f"perplexity on {self.eval_tokens} tokens of {eval_name}"
            table.caption_justify = "left"
        return table

    def _render_worst(self) -> RenderableType:
        ranked = sorted(self.weights, key=lambda weight: weight.rank)[:WORST_WEIGHTS]
        kind = "outputs" if self.calibration_tokens else "weights"
        table = Table(box=None, pad_edge=False)
        table.add_column(f"lowest SQNR of {len(self.weights)} linears", overflow="fold")
        table.add_column("shape", justify="right")
        table.add_column(f"{kind}, dB", justify="right")
        for weight in ranked:
            shape = "×".join(map(str, weight.shape))
            table.add_row(weight.name, shape, f"{weight.rank:.1f}")
        dense = [f"{name} ({reason})" for name, reason in self.ignored.items()]
        if len(dense) > 1:
            more = f" and {len(dense) - 3} more" if len(dense) > 3 else ""
            return Group(table, "", Text(f"dense: {', '.join(dense[:3])}{more}", style="dim"))
        return table


def format_size(count: int) -> str:
    """`1.2 GB` or `35.0 MB`."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
