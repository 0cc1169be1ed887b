"""The fuser from top to bottom: claims, and a region to its kernels."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite import device, native
from fulgurite.errors import FusionError
from fulgurite.fuser import cost
from fulgurite.fuser.codegen.cpp import translation_unit
from fulgurite.fuser.codegen.kernel_names import kernel_name
from fulgurite.fuser.codegen.triton import module
from fulgurite.fuser.frontend import lower_graph
from fulgurite.fuser.frontend.input_mutations import in_place
from fulgurite.fuser.frontend.pointwise import Unsupported
from fulgurite.fuser.gemm.library_fallback import LibraryRegion
from fulgurite.fuser.gemm.lower import lower_matmul
from fulgurite.fuser.gemm.pattern import has_products
from fulgurite.fuser.ir.expression import value_type
from fulgurite.fuser.ir.split_axes import refine
from fulgurite.fuser.ir.statement import Region
from fulgurite.fuser.pipeline_triton import installed, lower_triton
from fulgurite.fuser.runtime.compile_pool import compilers
from fulgurite.fuser.runtime.compile_triton import interpreting
from fulgurite.fuser.runtime.cpu_region import FusedRegion
from fulgurite.fuser.runtime.kernel import Kernel, measured
from fulgurite.fuser.schedule import choose_schedule
from fulgurite.fuser.segment import segment
from fulgurite.fuser.segment.build_loop_nest import build
from fulgurite.trace.cost import tensors
from fulgurite.trace.signature import call_signature


def why_not(node: torch.fx.Node) -> str | None:
    """Why a node can't be part of a generated kernel, or None where it can."""
    return _no_place(node) or lower_graph.unreadable(node)


def _no_place(node: torch.fx.Node) -> str | None:
    """Why there can't be a kernel where a node's tensors are."""
    places = places_of([node, *node.all_input_nodes])
    if len(places) > 1:
        return f"tensors on {' and '.join(sorted(map(str, places)))}"
    if torch.device("cpu") in places and native.compiler() is None:
        return "there is no C++ compiler"
    if places - {torch.device("cpu")} and not installed():
        return "Triton is not installed"
    if places - {torch.device("cpu")}:
        for tensor in tensors_of([node, *node.all_input_nodes]):
            part = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
            if value_type(part) == torch.float32 and part not in module.POINTERS:
                return f"{tensor.dtype} on a GPU"
    return None


def tensors_of(nodes: list[torch.fx.Node]) -> list[torch.Tensor]:
    """What nodes make, as FakeTensors."""
    return [tensor for node in nodes for tensor in tensors(node.meta.get("val"))]


def places_of(nodes: list[torch.fx.Node]) -> set[torch.device]:
    """The devices of the tensors that nodes make."""
    return {tensor.device for tensor in tensors_of(nodes)}


def claims(node: torch.fx.Node) -> bool:
    """Can this one node be part of a generated kernel?"""
    return node.op == "call_function" and _no_place(node) is None and _is_readable(node)


def _is_readable(node: torch.fx.Node) -> bool:
    """Whether the IR can say it: read once for equal calls, of which layers have many."""
    schema = getattr(node.target, "_schema", None)
    alone = schema is None or schema.is_mutable  # a write depends on who else reads its target
    call = None if alone else call_signature(node)
    if call is None:
        return lower_graph.unreadable(node) is None
    if call not in _READABLE:
        if len(_READABLE) >= MOST_REMEMBERED:
            _READABLE.clear()
        _READABLE[call] = lower_graph.unreadable(node) is None
    return _READABLE[call]


_READABLE: dict[str, bool] = {}
MOST_REMEMBERED = 1 << 13  # calls, some hundred bytes each


def expect_many() -> None:
    """Kernels for a GPU, many of them, will be asked for soon."""
    if installed() and not interpreting():
        compilers().expect()


def lower(
    region: torch.fx.GraphModule, use_triton: bool = False, tune: bool = False
) -> FusedRegion:
    """The region's kernels, built and ready to call.

    They are Triton's for tensors on a GPU, and where that is asked for; `tune` searches their schedules.
    """
    place = next(iter(places_of(list(region.graph.nodes))), torch.device("cpu"))
    try:
        with _disable_current_modes():  # a region is lowered while torch traces on FakeTensors
            if has_products(region):
                return lower_products(region, place, tune)
            if use_triton or place.type == "cuda":
                return lower_triton(lower_graph.read(region), place, tune)
            return lower_region(lower_graph.read(region, corrects=True))
    except Unsupported as reason:
        raise FusionError(
            f"{reason} can't be part of a generated kernel",
            next="ask fulgurite.fuser.claims(node) for each node of the region first",
        ) from reason


def lower_products(region: torch.fx.GraphModule, place: torch.device, tune: bool) -> FusedRegion:
    """One kernel for products and what reads them; the library's and a kernel where that can't be."""
    if place.type == "cuda" or interpreting():
        try:
            return lower_matmul(region, place, tune)
        except Unsupported:  # regions are gathered after it was seen that it can; order may cut one
            pass
    return LibraryRegion(region, lower)


def lower_region(read: Region) -> FusedRegion:
    """The kernels of a region of the IR."""
    refined = refine(read)
    machine = device.cpu()
    segments = segment(refined, machine.second_level_cache)
    texts, schedules = [], []
    refined, nests = in_place(refined, [build(refined, part) for part in segments])
    for number, (part, nest) in enumerate(zip(segments, nests, strict=True)):
        schedules.append(choose_schedule(nest, machine))
        texts.append(translation_unit.write_kernel(kernel_name(part, number), schedules[-1]))
    unit = translation_unit.write_unit(texts, refined.tensors)
    library = native.begin(unit.source) if texts else None
    kernels = []
    for part, text, schedule in zip(segments, texts, schedules, strict=True):
        assert library is not None, "a kernel without a library"
        touched = (*text.reads, *text.writes, *text.updates)
        moved = sum(cost.tensor_bytes(refined.tensors[n]) for n in touched)
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
