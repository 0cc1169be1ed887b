"""Fulgurite: a compiler and LLM system on PyTorch that shows every step as Python you can read.

PyTorch program
  │  capture/      TorchDynamo finds the graph, AOTAutograd makes it functional: forward and backward
  ▼
Trace              trace/: an fx graph with metadata, printed as runnable Python, verified
  │  transforms/   Trace → Trace, an ordered visible list
  ▼
claimed Trace      executors/: each op goes to the first executor that can run it
  │
  ▼
a Python callable  its source is the last trace
"""

from fulgurite.capture.dynamo import GraphBreak
from fulgurite.compile import Compiled, compile
from fulgurite.errors import FulguriteError
from fulgurite.executors import (
    Executor,
    executor_names,
    region,
    register_executor,
    subgraph,
    unprintable,
)
from fulgurite.fuse import fuse
from fulgurite.op import Op, op
from fulgurite.trace import Trace, verify
from fulgurite.transforms import TimeOps, Transform, transform
from fulgurite.version import VERSION

__version__ = VERSION

__all__ = [
    "Compiled",
    "Executor",
    "FulguriteError",
    "GraphBreak",
    "Op",
    "TimeOps",
    "Trace",
    "Transform",
    "compile",
    "executor_names",
    "fuse",
    "op",
    "region",
    "register_executor",
    "subgraph",
    "transform",
    "unprintable",
    "verify",
]
