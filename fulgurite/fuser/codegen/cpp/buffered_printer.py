"""An expression printer that knows buffered loads.

In: expressions of the IR. Out: C++ text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fulgurite.fuser.codegen.cpp.expressions import ExpressionPrinter
from fulgurite.fuser.ir.expression import Load


@dataclass
class BufferedPrinter(ExpressionPrinter):
    """Prints some loads as reads of a buffer."""

    buffers: dict[Load, str] = field(default_factory=dict)

    def print_load(self, load: Load) -> str:
        buffer = self.buffers.get(load)
        return super().print_load(load) if buffer is None else self.print_widened(load, buffer)
