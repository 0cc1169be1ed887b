"""Numbers with units as text. Imports nothing, for processes without torch."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """`96.0 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
