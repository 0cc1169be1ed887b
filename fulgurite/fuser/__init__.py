"""The fuser: a region of a trace in, few generated kernels out.

    region (fx)  → from_trace → ir.Region → refine → segment → nest → schedule → codegen → launch

`claims(node)` says whether one node can be part of a generated kernel; `lower(region)` turns a region
of such nodes into a callable. The IR (`ir.py`, `index.py`) knows no threads and no languages; schedules
decide loops; code generators only spell them. `interpret.py` runs the IR in plain torch: the oracle.
"""

from __future__ import annotations

from fulgurite.fuser.pipeline import claims, expect_many, lower, lower_region, why_not
from fulgurite.fuser.runtime.cpu_region import FusedRegion
from fulgurite.fuser.runtime.kernel import Kernel

__all__ = ["FusedRegion", "Kernel", "claims", "expect_many", "lower", "lower_region", "why_not"]
