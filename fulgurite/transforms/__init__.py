"""Trace → Trace.

In and out: a Trace. A transform says in which phase it runs: before autograd (the captured program), after
autograd (functional ATen), or after claiming (each call has its executor).

    base.py         the contract           simplify.py  dead code, constants, algebra, common subexpressions
    purity.py       what may be moved      decompose.py one op → the pieces it is made of
    remat.py        what backward saves    quantize.py  FP8 training
    attention.py    masks that are known before anything runs
    pooling.py      max pooling that keeps a byte an element for backward
    masks.py        gradients of a relu that don't read its result
    losses.py       the gradient of a cross entropy without a scatter
    cross_entropy.py  the same from the logits themselves, which forward then need not turn into logarithms
    nonfinite.py, annotation.py, op_times.py   tools that are transforms
"""

from fulgurite.transforms.annotation import annotate
from fulgurite.transforms.base import Phase, Transform, as_transform, transform
from fulgurite.transforms.nonfinite import find_nonfinite
from fulgurite.transforms.op_times import TimeOps
from fulgurite.transforms.quantize import fp8_training
from fulgurite.transforms.simplify import SIMPLIFY

__all__ = [
    "SIMPLIFY",
    "Phase",
    "TimeOps",
    "Transform",
    "annotate",
    "as_transform",
    "find_nonfinite",
    "fp8_training",
    "transform",
]
