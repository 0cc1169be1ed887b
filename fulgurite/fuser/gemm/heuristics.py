"""Whether one kernel for a product and its epilogue should be faster than the library's call and a kernel.

In: a region with products. Out: `Expected`: what is saved (the product is not read again, and a launch), what is lost
(a generated product is slower than the library's, and nothing is computed beside its epilogue), and the answer. It
says yes only for devices and sizes that were measured; `tune=True` measures others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fulgurite import device
from fulgurite.fuser import cost
from fulgurite.fuser.gemm import pattern
from fulgurite.fuser.gemm.lower import kernel_name, scheduled, tensor_rate
from fulgurite.fuser.gemm.pattern import Matmuls
from fulgurite.fuser.gemm.schedule import MatmulSchedule
from fulgurite.fuser.pipeline_triton import PRETENDED
from fulgurite.trace.cost import is_view

# on an H200, products of 8192 x 4096 with inner sizes from 512 to 4096 (docs/fuser-gpu.md): with these numbers the
# rule says yes to none that was slower
MEASURED = (9, 0)  # compute capability
LAUNCH_SECONDS = 2e-6  # between two kernels of a stream
START_SECONDS = 3e-6  # descriptors, the first tiles, and the last
LOSS = 0.025  # of the library's time for the product
INSTRUCTIONS = 1 / 3  # of the epilogue's operations that the library's product would have hidden
MARGIN = 0.01  # of the whole, which must be won
LEAST_ROWS = 1024
MOST_DEPTH = 4096
MOST_WEIGHTS = 1 << 25  # elements of the right matrices


@dataclass(frozen=True)
class Expected:
    """What one kernel should save and lose, in seconds."""

    name: str
    saved: float
    lost: float
    total: float  # of the library's call and a kernel
    known: bool  # was it measured on such a device and such sizes?

    @property
    def pays(self) -> bool:
        return self.known and self.saved - self.lost > MARGIN * self.total

    @property
    def why(self) -> str:
        if not self.known:
            return "one kernel was not faster, or not measured, for such products; tune=True does"
        return f"one kernel saves {1e6 * self.saved:.1f} µs and loses {1e6 * self.lost:.1f}"


def expected(module: fx.GraphModule) -> Expected:
    """For a region with products; raises Unsupported where it can't be one kernel."""
    place = next(n.meta["val"].device for n in module.graph.nodes if n.target in pattern.PRODUCTS)
    machine = device.cuda(place.index or 0) if place.type == "cuda" else PRETENDED
    read = pattern.read(module)
    schedule, part = scheduled(read, machine)
    rows = cost.number(schedule.rows.size)
    product = sum(2 * rows * p.width * p.depth for p in read.products) / tensor_rate(machine)
    work = sum(f.flops * f.elements for f in part.shape.facts.values())
    saved = saved_bytes(read) / machine.copy_bandwidth + LAUNCH_SECONDS
    lost = LOSS * product + INSTRUCTIONS * work / machine.flops + START_SECONDS
    known = _measured(read, schedule, place) and not _keeps_a_product(module)
    return Expected(kernel_name(part), saved, lost, product + 2 * saved, known)


def saved_bytes(read: Matmuls) -> int:
    """The products: a kernel would read them again."""
    return sum(cost.tensor_bytes(s.tensor) for s in read.region.statements if s.origin == "mm")


def _keeps_a_product(module: fx.GraphModule) -> bool:
    """Whether a product is wanted for itself, too, as training does: its second store is not hidden.

    A Llama's gate and up products of 8192 x 8192 x 2048 took 0.94 ms so, and 0.82 with the library and a kernel.
    """
    (output,) = module.graph.find_nodes(op="output")
    for node in output.all_input_nodes:
        while is_view(node):
            node = node.all_input_nodes[0]
        if node.target in pattern.PRODUCTS:
            return True
    return False


def _measured(read: Matmuls, schedule: MatmulSchedule, place: torch.device) -> bool:
    if place.type == "cuda" and torch.cuda.get_device_capability(place) != MEASURED:
        return False
    rows = schedule.rows.size
    if not (schedule.descriptors and rows.is_constant and rows.constant >= LEAST_ROWS):
        return False
    weights = sum(p.width * p.depth for p in read.products)
    return read.products[0].depth <= MOST_DEPTH and weights <= MOST_WEIGHTS
