"""Who runs each op.

In: a functional Trace. Out: a claimed Trace (every op has an executor, composite ops taken apart where their
pieces fuse), and then a final one, where each region an executor took is one call.

    base.py     the contract, the list of executors     claim.py    the priority walk with late decomposition
    gather.py   neighbouring ops → regions              torch.py    everything, op by op
    regions.py  regions → calls                         extract.py  a region as a graph module of its own
    writes.py   writes to inputs, gathered              whole.py    ops that were taken apart, and the way back
    tune.py     the fastest executor, by measuring      fuser.py    regions through generated kernels
    inductor.py regions through TorchInductor
    load.py     @region, @subgraph in a printed trace → what they were
"""

from fulgurite.executors.base import Executor, executor_names, register_executor, resolve_executors
from fulgurite.executors.claim import claim
from fulgurite.executors.fuser import FUSER
from fulgurite.executors.inductor import INDUCTOR
from fulgurite.executors.load import region, subgraph, unprintable
from fulgurite.executors.regions import lower
from fulgurite.executors.torch import TORCH

BUILT_IN = [TORCH, FUSER, INDUCTOR]
for _executor in BUILT_IN:
    register_executor(_executor)

__all__ = [
    "BUILT_IN",
    "Executor",
    "claim",
    "executor_names",
    "lower",
    "region",
    "register_executor",
    "resolve_executors",
    "subgraph",
    "unprintable",
]
