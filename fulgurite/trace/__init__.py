"""The program as a value: an fx graph with metadata at one stage, printed as runnable Python.

In: `torch.fx.GraphModule`s from capture and from transforms. Out: `Trace`s, their text, the callable that
the text compiles to, and the checks of the verifier.

    trace.py           Trace: one stage of one graph      region.py     ops that one executor runs as one call
    printer.py         Trace → Python text                extract.py    nodes → a graph module of their own
    literal.py         a value → a Python expression      signature.py  a region without names: a cache key
    qualified_name.py  a function → its dotted name       mutations.py  writes to a graph's inputs
    comments.py        types, source lines and costs      purity.py     what may be dropped, merged or moved
    source.py          Python text → a callable           cost.py       bytes and flops of a node
    verify.py          the rules of each stage            describe.py   "bf16[4, s0]", the user's source line
    node_meta.py       typed access to node.meta          metadata.py   FakeTensor propagation
    frozen.py          regions of parameters, run once
"""

from fulgurite.trace.describe import Source, describe, source_of
from fulgurite.trace.trace import Kind, Trace
from fulgurite.trace.verify import verify

__all__ = ["Kind", "Source", "Trace", "describe", "source_of", "verify"]
