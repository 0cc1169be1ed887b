"""The fuser from top to bottom: claims, and a region to its kernels."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite import device, native
from fulgurite.errors import FusionError

from . import cost, from_trace
from .codegen import cpp
from .ir import Region
from .launch import FusedRegion, Kernel, measured
from .nest import build
from .pointwise_rules import Unsupported
from .refine import refine
from .schedule import choose_schedule
from .segment import Segment, segment


def why_not(node: torch.fx.Node) -> str | None:
    """Why a node can't be part of a generated kernel, or None where it can."""
    if native.compiler() is None:
        return "there is no C++ compiler"
    return from_trace.unreadable(node)


def claims(node: torch.fx.Node) -> bool:
    """Can this one node be part of a generated kernel?"""
    return node.op == "call_function" and why_not(node) is None


def lower(region: torch.fx.GraphModule) -> FusedRegion:
    """The region's kernels, built and ready to call."""
    try:
        with _disable_current_modes():  # a region is lowered while torch traces on FakeTensors
            return lower_region(from_trace.read(region))
    except Unsupported as reason:
        raise FusionError(
            f"{reason} can't be part of a generated kernel",
            next="ask fulgurite.fuser.claims(node) for each node of the region first",
        ) from reason


def lower_region(read: Region) -> FusedRegion:
    """The kernels of a region of the IR."""
    refined = refine(read)
    machine = device.cpu()
    segments = segment(refined, machine.second_level_cache)
    texts, schedules = [], []
    for number, part in enumerate(segments):
        nest = build(refined, part)
        schedules.append(choose_schedule(nest, machine))
        texts.append(cpp.write_kernel(kernel_name(part, number), schedules[-1]))
    unit = cpp.write_unit(texts, refined.tensors)
    library = native.load(unit.source) if texts else None
    kernels = []
    for part, text, schedule in zip(segments, texts, schedules, strict=True):
        assert library is not None, "a kernel without a library"
        moved = sum(cost.tensor_bytes(refined.tensors[n]) for n in (*text.reads, *text.writes))
        work = sum(f.flops * f.elements for f in part.shape.facts.values())
        kernels.append(
            Kernel(
                text.name,
                text.text,
                schedule,
                tuple(f.statement.origin for f in part.shape.facts.values()),
                moved,
                work,
                cost.seconds(machine, moved, work),
                part.reason,
                measured(text, unit, library, refined),
            )
        )
    return FusedRegion(refined, unit, tuple(kernels), library)


def kernel_name(part: Segment, number: int) -> str:
    """A name from the ops of the segment, those that say most about it."""
    dull = ("add", "mul", "sub", "div", "_to_copy", "clone", "scalar_tensor", "full", "where")
    ops = list(dict.fromkeys(f.statement.origin for f in part.shape.facts.values()))
    telling = [op for op in ops if op not in dull] or ops
    return "_".join(op.strip("_") for op in telling[:3]) + f"_{number}"
