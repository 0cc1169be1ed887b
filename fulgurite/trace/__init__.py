"""The program as a value: an fx graph with metadata, a stage, and a text that is runnable Python.

In: `torch.fx.GraphModule`s from capture and from transforms. Out: `Trace`s, their text, the callable
that the text compiles to, and the verdict of the verifier.

    trace.py     Trace: one stage of one graph            describe.py  "bf16[4, s0]", the user's source line
    printer.py   Trace → Python text                      cost.py      bytes and flops of a node
    literal.py   a value → the Python that makes it       verify.py    what is legal at each stage
    text.py      Python text → a callable again           metadata.py  FakeTensor propagation
"""

from fulgurite.trace.describe import Source, describe, source_of
from fulgurite.trace.trace import Kind, Trace
from fulgurite.trace.verify import verify

__all__ = ["Kind", "Source", "Trace", "describe", "source_of", "verify"]
