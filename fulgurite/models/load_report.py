"""`LoadReport`: what was loaded, in which formats, and what could not stay quantized."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LoadReport:
    """What loading a checkpoint did.

    method           `quant_method` of the checkpoint, or ""
    formats          number format (or dtype) -> bytes of the parameters in it
    dequantized      parameters that the file stores quantized and the model holds dense -> why
    dynamic_inputs   modules whose static input scale is not used: experts quantize their inputs on
                     the fly
    seconds          time to read all weights
    file_opens       how often a file was opened
    """

    method: str = ""
    formats: dict[str, int] = field(default_factory=dict)
    dequantized: dict[str, str] = field(default_factory=dict)
    dynamic_inputs: tuple[str, ...] = ()
    seconds: float = 0.0
    file_opens: int = 0

    def __str__(self) -> str:
        lines = [f"{name}: {count / 2**20:.1f} MiB" for name, count in self.formats.items()]
        reasons: dict[str, list[str]] = {}
        for name, reason in self.dequantized.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"dequantized: {names[0]}{more}: {reason}")
        if self.dynamic_inputs:
            lines.append(f"{len(self.dynamic_inputs)} static input scales of experts are not used")
        return "\n".join(lines)
