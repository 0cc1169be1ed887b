"""Trace → Trace.

In and out: a Trace. A transform says in which phase it runs: before autograd (the captured program), after
autograd (functional ATen), or after claiming (each call has its executor).

    base.py         the contract           simplify.py  dead code, constants, algebra, common subexpressions
    purity.py       what may be moved      decompose.py one op → the pieces it is made of
    remat.py        what backward saves    find_nonfinite.py, annotate.py, time_ops.py   tools that are transforms
"""

from fulgurite.transforms.annotate import annotate
from fulgurite.transforms.base import Phase, Transform, as_transform, transform
from fulgurite.transforms.find_nonfinite import find_nonfinite
from fulgurite.transforms.simplify import SIMPLIFY
from fulgurite.transforms.time_ops import TimeOps

__all__ = [
    "SIMPLIFY",
    "Phase",
    "TimeOps",
    "Transform",
    "annotate",
    "as_transform",
    "find_nonfinite",
    "transform",
]
