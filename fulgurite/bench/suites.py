"""The suites, one function each: `SUITES`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from fulgurite.bench.compile_time import compile_time
from fulgurite.bench.dispatch import dispatch
from fulgurite.bench.fusions import fusions
from fulgurite.bench.generate import generate
from fulgurite.bench.mla import mla_suite
from fulgurite.bench.models import models
from fulgurite.bench.moe import moe
from fulgurite.bench.quant import quant

SUITES: dict[str, Callable[[argparse.Namespace], None]] = {
    "compile": compile_time,
    "dispatch": dispatch,
    "fusions": fusions,
    "generate": generate,
    "mla": mla_suite,
    "models": models,
    "moe": moe,
    "quant": quant,
}
