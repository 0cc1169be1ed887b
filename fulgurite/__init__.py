"""Fulgurite: a deep-learning compiler and LLM system on PyTorch. Every step prints as Python.

PyTorch program
  │  capture/      TorchDynamo captures graphs; AOTAutograd functionalizes and differentiates them
  ▼
Trace              trace/: an fx graph with FakeTensor metadata, printed as runnable Python
  │  transforms/   Trace → Trace, in a fixed order
  ▼
claimed Trace      executors/: each op goes to the first executor that can run it
  │  fuser/        regions of ops → generated kernels: Triton on GPUs, C++ on CPUs
  ▼
Python callable    its source is the final trace
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fulgurite.lazy import make_lazy
from fulgurite.logs import configure_logging
from fulgurite.version import VERSION

if TYPE_CHECKING:
    from fulgurite.capture.dynamo import GraphBreak
    from fulgurite.compile import Compiled, compile
    from fulgurite.determinism import deterministic
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
    from fulgurite.quant.config import QuantConfig
    from fulgurite.quantize import quantize
    from fulgurite.serve.embedding import EmbeddingModel
    from fulgurite.serve.engine.request import SamplingParams
    from fulgurite.serve.llm import LLM
    from fulgurite.trace import Trace, verify
    from fulgurite.transforms import TimeOps, Transform, transform

__version__ = VERSION
configure_logging()

__all__ = [
    "LLM",
    "Compiled",
    "EmbeddingModel",
    "Executor",
    "FulguriteError",
    "GraphBreak",
    "Op",
    "QuantConfig",
    "SamplingParams",
    "TimeOps",
    "Trace",
    "Transform",
    "compile",
    "deterministic",
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

__getattr__, __dir__ = make_lazy(__name__)
