"""The formulas of a kernel's statements, as comments above its function."""

from __future__ import annotations

from fulgurite.fuser.ir.loop_nest import LoopNest

MAX_FORMULAS = 24  # lines
MAX_COLUMNS = 160


def print_formulas(nest: LoopNest, prefix: str) -> list[str]:
    """One comment line a formula; `prefix` starts a comment in the target language."""
    return [f"{prefix} {formula}"[:MAX_COLUMNS] for formula in nest.formulas[:MAX_FORMULAS]]
