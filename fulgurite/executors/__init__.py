"""Executors: who runs each op.

In: a functional Trace. Out: a claimed Trace, where every op has an executor; then a final Trace, where
each region is one call of its executor.

    base.py          the executor contract and registry
    claim.py         each op to the first executor that claims it, with late decomposition
    refusals.py      ops that torch's kernels refuse: torch raises their errors
    composite.py     composite ops that were decomposed, and how to restore them
    grouping.py      claimed ops → regions           sinking.py        where input-only ops go
    memory_order.py  order of regions by memory      donation.py       which inputs regions overwrite
    regions.py       regions → calls                 input_writes.py   writes to inputs, fused
    autotune.py      the fastest executor of a region, by measurement
    torch.py         every op as a call of torch     pooled_matmul.py  CPU matmuls into pooled memory
    fuser.py         regions as generated kernels    inductor.py       regions through TorchInductor
    cudnn.py         attention by cuDNN's frontend
    transformer_engine.py  linears in FP8 by TransformerEngine
    cudagraph.py     parts of a final trace as CUDA graphs
    load.py          @region, @subgraph of a printed trace
"""

from fulgurite.executors.base import Executor, executor_names, register_executor, resolve_executors
from fulgurite.executors.claim import claim
from fulgurite.executors.cudnn import CUDNN
from fulgurite.executors.fuser import FUSER
from fulgurite.executors.inductor import INDUCTOR
from fulgurite.executors.load import region, subgraph, unprintable
from fulgurite.executors.regions import lower_trace
from fulgurite.executors.torch import TORCH
from fulgurite.executors.transformer_engine import TRANSFORMER_ENGINE

BUILT_IN = [TORCH, FUSER, INDUCTOR, CUDNN, TRANSFORMER_ENGINE]
for _executor in BUILT_IN:
    register_executor(_executor)

__all__ = [
    "BUILT_IN",
    "Executor",
    "claim",
    "executor_names",
    "lower_trace",
    "region",
    "register_executor",
    "resolve_executors",
    "subgraph",
    "unprintable",
]
