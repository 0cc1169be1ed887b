"""A region to its Triton kernels: segments, nests, GPU schedules, text, launcher.

In: a region of the IR and where its tensors are. Out: a `TritonRegion`. The IR, its refinement and the
nests are those of the C++ kernels; only what a row may weigh, the schedules and the text differ.
"""

from __future__ import annotations

import functools
import importlib.util

import torch

from fulgurite import device
from fulgurite.device import Device
from fulgurite.fuser import cost
from fulgurite.fuser.codegen.kernel_names import kernel_name
from fulgurite.fuser.codegen.triton.module import Stage, write_stages
from fulgurite.fuser.frontend.input_mutations import in_place
from fulgurite.fuser.ir.split_axes import refine
from fulgurite.fuser.ir.statement import Region
from fulgurite.fuser.runtime.autotune import searched
from fulgurite.fuser.runtime.compile_triton import Program, interpreting, make_program, measured
from fulgurite.fuser.runtime.kernel import Kernel
from fulgurite.fuser.runtime.triton_region import TritonRegion, needs_wide
from fulgurite.fuser.schedule.gpu.choose import GpuSchedule, choose_gpu_schedule, row_limit
from fulgurite.fuser.segment import Segment, segment
from fulgurite.fuser.segment.build_loop_nest import build

LONGEST_ROW = (
    1 << 20
)  # bytes of float32 that several passes may walk: the second level cache has it
# what schedules see in the interpreter, where nothing is timed: an H200
PRETENDED = Device("interpreter", 4, 4.2e12, 2.9e13, 256 << 10, 50 << 20, (torch.float32,))


@functools.cache
def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def lower_triton(read: Region, place: torch.device, tune: bool = False) -> TritonRegion:
    """The kernels of a region of the IR whose tensors are on `place`; `tune` searches schedules."""
    refined = refine(read)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    assert place.type == "cuda" or interpreting(), "CPU tensors need TRITON_INTERPRET=1"
    machine = device.cuda(place.index) if place.type == "cuda" else PRETENDED
    segments = segment(refined, row_limit(machine))
    names = [kernel_name(part, number) for number, part in enumerate(segments)]
    refined, nests = in_place(refined, [build(refined, part) for part in segments])
    schedules = [choose_gpu_schedule(nest, machine) for nest in nests]
    wide = needs_wide(refined)
    if tune and not interpreting():
        schedules = [
            searched(name, schedule, machine, place, bool(wide))
            for name, schedule in zip(names, schedules, strict=True)
        ]

    @functools.cache
    def write(with_wide: bool, aligned: bool = True) -> Program:
        stages: list[Stage] = []
        for name, schedule in zip(names, schedules, strict=True):
            stages += write_stages(name, schedule, machine, with_wide)
        return make_program(stages)

    program = write(bool(wide), True)
    kernels = []
    for part, name, schedule in zip(segments, names, schedules, strict=True):
        kernels.append(_kernel(refined, program, part, name, schedule, machine, place))
    return TritonRegion(refined, write, tuple(kernels), place, wide)


def _kernel(
    region: Region,
    program: Program,
    part: Segment,
    name: str,
    schedule: GpuSchedule,
    machine: Device,
    place: torch.device,
) -> Kernel:
    own = [s for s in program.stages if s.name in (name, f"{name}_finish", f"{name}_finish_all")]
    tensors = list(dict.fromkeys(t.name for s in own for t in s.tensors if t not in s.parts))
    tensors += [name for s in own for name in s.updates]
    moved = sum(cost.tensor_bytes(region.tensors[n]) for n in tensors if n in region.tensors)
    facts = part.shape.facts.values()
    work = sum(f.flops * f.elements for f in facts)
    return Kernel(
        name,
        "\n\n\n".join(s.text for s in own),
        schedule,
        tuple(f.statement.origin for f in facts),
        moved,
        work,
        cost.seconds(machine, moved, work),
        part.reason,
        measured(program, [s.name for s in own], place),
    )
