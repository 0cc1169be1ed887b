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

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from fulgurite.quant.recipe import Recipe
from fulgurite.quantize import quantize
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.trace import Trace, verify
from fulgurite.transforms import TimeOps, Transform, transform
from fulgurite.version import VERSION

if TYPE_CHECKING:
    from fulgurite.serve.llm import LLM

__version__ = VERSION

__all__ = [
    "LLM",
    "Compiled",
    "Executor",
    "FulguriteError",
    "GraphBreak",
    "Op",
    "Recipe",
    "SamplingParams",
    "TimeOps",
    "Trace",
    "Transform",
    "compile",
    "executor_names",
    "fuse",
    "op",
    "quantize",
    "region",
    "register_executor",
    "subgraph",
    "transform",
    "unprintable",
    "verify",
]


def __getattr__(name: str) -> Any:
    """`LLM` when it is first asked for: compiling needs no tokenizer."""
    if name == "LLM":
        from fulgurite.serve.llm import LLM

        return LLM
    raise AttributeError(f"module 'fulgurite' has no attribute {name!r}")
