"""A search around the schedule that was chosen: `tune=True`.

In: a GPU schedule and what measures it. Out: the fastest of a dozen neighbours, compiled side by side and timed
on the device. What was found is kept in the cache for this device, this Triton and this kernel's text.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import torch

from fulgurite import cache
from fulgurite.device import Device
from fulgurite.fuser.codegen.triton.module import write_stages
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.runtime.compile_triton import ALIGNED, WIDE, Program, make_program, measured
from fulgurite.fuser.schedule.gpu.choose import GpuSchedule

MOST_TRIED = 24
MOST_WARPS = 32
ELEMENTS = (4, 64)  # of a block, a thread


def neighbours(schedule: GpuSchedule) -> list[GpuSchedule]:
    """The schedule, and those with twice or half of its numbers, fewest changes first."""
    loops = schedule.looped or schedule.programs > 0
    axis = resizable(schedule)
    choices = itertools.product(
        (1.0, 0.5, 2.0),
        (1.0, 0.5, 2.0) if axis is not None else (1.0,),
        (1.0, 0.5, 2.0) if schedule.programs or schedule.split else (1.0,),
        (schedule.stages, 1, 2, 3, 4) if loops else (schedule.stages,),
    )
    found = {str(schedule): (0, schedule)}
    for warps, size, share, stages in choices:
        near = replace(
            schedule,
            warps=int(schedule.warps * warps),
            sizes={a: int(n * size) if a == axis else n for a, n in schedule.sizes.items()},
            programs=int(schedule.programs * share),
            split=int(schedule.split * share),
            stages=stages,
        )
        changes = sum(f != 1 for f in (warps, size, share)) + (stages != schedule.stages)
        if possible(near, schedule):
            found.setdefault(str(near), (changes, near))
    return [near for _, near in sorted(found.values(), key=lambda pair: pair[0])][:MOST_TRIED]


def resizable(schedule: GpuSchedule) -> Axis | None:
    """The loop whose block may grow and shrink: rows that are held whole may not."""
    held = schedule.nest.body if schedule.kept or not schedule.looped else ()
    return next((axis for axis in schedule.blocks if axis not in held), None)


def possible(s: GpuSchedule, start: GpuSchedule) -> bool:
    if not 1 <= s.warps <= MOST_WARPS or (start.split and s.split < 2):
        return False
    if start.programs and s.programs < 1:
        return False
    points = 1
    for axis in s.blocks:
        points *= s.sizes[axis]
    low, high = ELEMENTS
    return min(s.sizes.values(), default=1) >= 1 and low <= points // (32 * s.warps) <= high


def searched(
    name: str,
    schedule: GpuSchedule,
    machine: Device,
    place: torch.device,
    wide: bool,
) -> GpuSchedule:
    """The fastest neighbour, or what an earlier search found."""
    base = make_program(write_stages(name, schedule, machine, wide))
    key = cache.digest("gpu schedule", machine.name, base.text)
    kept = cache.read_text("decisions", key)
    if kept is not None:
        return _decoded(schedule, json.loads(kept))
    programs: list[tuple[GpuSchedule, Program]] = []
    variant = ALIGNED | (WIDE if wide else 0)
    for near in neighbours(schedule):
        program = make_program(write_stages(name, near, machine, wide))
        program.begin(variant)  # all of them at once; what is measured finds them in the cache
        programs.append((near, program))
    times = []
    for near, program in programs:
        names = [stage.name for stage in program.stages]
        times.append((measured(program, names, place)(), near))
    best = min(times, key=lambda pair: pair[0])[1]
    cache.write_text("decisions", key, json.dumps(_encoded(best)))
    return best


def _encoded(s: GpuSchedule) -> dict[str, object]:
    sizes = {axis.name: size for axis, size in s.sizes.items()}
    numbers = {"warps": s.warps, "stages": s.stages, "programs": s.programs, "split": s.split}
    return {"sizes": sizes, **numbers}


def _decoded(s: GpuSchedule, kept: dict) -> GpuSchedule:  # type: ignore[type-arg]
    sizes = {axis: kept["sizes"][axis.name] for axis in s.sizes}
    numbers = {name: kept[name] for name in ("warps", "stages", "programs", "split")}
    return replace(s, sizes=sizes, **numbers)
