"""Horizontal fusion: pointwise kernels of one form on tensors of different sizes become one launch.

In: the schedules of a region's kernels, and their sources. Out: the sources to launch, in order. An
optimizer computes the same formula for every parameter. Its kernels differ in their addresses and sizes
only, and most are shorter than a launch. The fused kernel has the programs of all of them, one after the
other. A program finds its tensors by its number, in a binary search of `if`s, and then runs the one body:

    if program < 8:
        x, num_points, first_program = x_of_0, 2048, 0
    else:
        x, num_points, first_program = x_of_1, 231, 8
    i = (program - first_program) * 256 + tl.arange(0, 256)

Kernels have one form if their texts are equal up to names, with the size as a variable.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fulgurite.device import DeviceInfo
from fulgurite.fuser.codegen.triton.kernel import TritonKernelSource, write_kernels
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.index import Axis, Index, Symbol
from fulgurite.fuser.ir.loop_nest import substitute_axes
from fulgurite.fuser.schedule.gpu.base import GpuSchedule, count_points
from fulgurite.fuser.schedule.gpu.pointwise import choose_pointwise_block, choose_pointwise_warps

SIZE = Symbol("num_points")
FIRST, PROGRAM = "first_program", "program"
MAX_POINTERS = 256  # of a launch, whose arguments have 4 KiB
MIN_FUSED = 3  # kernels; two in one launch save too little to give up their own block sizes
ALIGNED_SIZE = 16  # elements: loads stay wide if the mask changes at multiples of this only
Form = tuple[object, ...]


@dataclass
class Launch:
    """Kernels that run together, and the launches that must run before."""

    position: int  # of its first kernel
    form: Form | None
    kernels: list[int] = field(default_factory=list)
    needs: set[int] = field(default_factory=set)


def fuse_horizontally(
    schedules: Sequence[GpuSchedule],
    sources: Sequence[list[TritonKernelSource]],
    device: DeviceInfo,
    int64_index: bool,
) -> list[TritonKernelSource]:
    """The sources to launch; `sources[k]` are those of `schedules[k]`."""
    forms = [
        _find_form(schedule, own, int64_index)
        for schedule, own in zip(schedules, sources, strict=True)
    ]
    result: list[TritonKernelSource] = []
    for launch in _order_launches(_group_kernels(forms, sources)):
        if len(launch.kernels) < MIN_FUSED:
            for k in sorted(launch.kernels):
                result += sources[k]
            continue
        result += _write_fused(
            [schedules[k] for k in launch.kernels],
            [sources[k][0] for k in launch.kernels],
            device,
            int64_index,
        )
    return result


# ---- which kernels -------------------------------------------------------------------------------


def _find_form(
    schedule: GpuSchedule, sources: list[TritonKernelSource], int64_index: bool
) -> Form | None:
    """What kernels must have in common to be fused; None for a kernel that can't be."""
    if not _is_plain(schedule, sources):
        return None
    (block,) = schedule.block_sizes.values()
    generic = _with_variable_size(schedule, block)
    (source,) = write_kernels("kernel", generic, int64_index)
    if source.symbols != (SIZE,):
        return None
    size = schedule.nest.grid[0].size.constant
    dtypes = tuple(tensor.dtype for tensor in source.tensors)
    return (_rename_locals(source.text, generic), dtypes, size % ALIGNED_SIZE == 0)


def _is_plain(schedule: GpuSchedule, sources: list[TritonKernelSource]) -> bool:
    """Whether a kernel is one loop over the points of contiguous tensors, of a known size."""
    nest = schedule.nest
    return (
        schedule.kind == "pointwise"
        and len(sources) == 1
        and not (nest.body or nest.initial or nest.tables)
        and len(nest.grid) == 1
        and schedule.block_axes == nest.grid
        and nest.grid[0].size.is_constant
        and not any(store.combine for store in nest.stores)
        and not (sources[0].has_asserts or sources[0].symbols or sources[0].partials)
        and not any(name in sources[0].text for name in (SIZE.name, FIRST, PROGRAM + " "))
    )


def _with_variable_size(schedule: GpuSchedule, block: int) -> GpuSchedule:
    """The schedule with the size of its loop as a variable."""
    (old,) = schedule.nest.grid
    axis = Axis(old.name, indices.from_atom(SIZE))
    nest = substitute_axes(schedule.nest, {old: indices.from_atom(axis)}, (axis,), ())
    return replace(schedule, nest=nest, block_axes=(axis,), block_sizes={axis: block})


def _rename_locals(text: str, schedule: GpuSchedule) -> str:
    """A kernel's body with its names numbered in order, and without its block size."""
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef), "a kernel is a function"
    names = {argument.arg: f"v{k}" for k, argument in enumerate(function.args.args)}
    (block,) = schedule.block_sizes.values()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.id, f"v{len(names)}")
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
    first, *rest = function.body  # the block size is in the first line only
    head = ast.unparse(first).replace(str(block), "BLOCK")
    return "\n".join([head, *map(ast.unparse, rest)])


def _group_kernels(
    forms: Sequence[Form | None], sources: Sequence[list[TritonKernelSource]]
) -> list[Launch]:
    """Launches of kernels of one form that don't depend on each other, directly or not."""
    launches: list[Launch] = []
    launch_of: list[Launch] = []
    reads, writes = zip(*map(_touched_memory, sources), strict=True) if sources else ((), ())
    for k, form in enumerate(forms):
        before = {
            launch_of[j].position
            for j in range(k)
            if writes[j] & (reads[k] | writes[k]) or reads[j] & writes[k]
        }
        reachable = _reachable(before, {launch.position: launch for launch in launches})
        launch = next(
            (
                other
                for other in reversed(launches)
                if form is not None and other.form == form and other.position not in reachable
            ),
            None,
        )
        if launch is None:
            launch = Launch(k, form)
            launches.append(launch)
        launch.kernels.append(k)
        launch.needs |= before - {launch.position}
        launch_of.append(launch)
    return launches


def _touched_memory(sources: list[TritonKernelSource]) -> tuple[set[str], set[str]]:
    """Names of the tensors that kernels read, and of those that they write."""
    writes = {name for source in sources for name in (*source.writes, *source.updates)}
    reads = {tensor.name for source in sources for tensor in source.tensors} - writes
    reads |= {name for source in sources for name in source.updates}
    return reads, writes


def _reachable(start: set[int], launches: dict[int, Launch]) -> set[int]:
    """The launches in `start`, and all that must run before them."""
    seen, stack = set(start), list(start)
    while stack:
        new = launches[stack.pop()].needs - seen
        seen |= new
        stack.extend(new)
    return seen


def _order_launches(launches: list[Launch]) -> list[Launch]:
    """Each launch after what it needs; the others stay in the order of their first kernels."""
    ordered: list[Launch] = []
    done: set[int] = set()
    while len(ordered) < len(launches):
        ready = next(x for x in launches if x.position not in done and x.needs <= done)
        done.add(ready.position)
        ordered.append(ready)
    return ordered


# ---- the fused kernel ----------------------------------------------------------------------------


def _write_fused(
    schedules: list[GpuSchedule],
    sources: list[TritonKernelSource],
    device: DeviceInfo,
    int64_index: bool,
) -> list[TritonKernelSource]:
    """As few launches as the number of arguments allows."""
    per_launch = max(MAX_POINTERS // len(sources[0].tensors), 1)
    return [
        _write_launch(
            schedules[k : k + per_launch], sources[k : k + per_launch], device, int64_index
        )
        for k in range(0, len(sources), per_launch)
    ]


def _write_launch(
    schedules: list[GpuSchedule],
    sources: list[TritonKernelSource],
    device: DeviceInfo,
    int64_index: bool,
) -> TritonKernelSource:
    """One kernel for all of these."""
    points = sum(count_points(schedule.nest.grid) for schedule in schedules)
    block = choose_pointwise_block(schedules[0].nest, points, device)
    num_warps = choose_pointwise_warps(schedules[0].nest, block)
    generic = [_with_variable_size(schedule, block) for schedule in schedules]
    written = [
        write_kernels("kernel", replace(s, num_warps=num_warps), int64_index)[0] for s in generic
    ]
    first = written[0]
    body_names, body = _split_function(first.text)
    pointers = body_names[: len(first.tensors)]
    is_shared = [len({w.tensors[k].name for w in written}) == 1 for k in range(len(pointers))]
    sizes = [schedule.nest.grid[0].size.constant for schedule in schedules]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // block))
    arguments, tensors, leaves = [], [], []
    for k, name in enumerate(pointers):
        if is_shared[k]:
            arguments.append(name)
            tensors.append(first.tensors[k])
    for j, source in enumerate(written):
        leaf = [f"{SIZE.name} = {sizes[j]}", f"{FIRST} = {starts[j]}"]
        for k, name in enumerate(pointers):
            if not is_shared[k]:
                arguments.append(f"{name}_of_{j}")
                tensors.append(source.tensors[k])
                leaf.append(f"{name} = {name}_of_{j}")
        leaves.append(leaf)
    name = f"{sources[0].name}_x{len(sources)}"
    lines = [f"{PROGRAM} = tl.program_id(0)", *_write_search(leaves, starts, 0, len(leaves))]
    if all(size % ALIGNED_SIZE == 0 for size in sizes):
        lines.append(f"{SIZE.name} = tl.multiple_of({SIZE.name}, {ALIGNED_SIZE})")
    lines += [line.replace("tl.program_id(0)", f"({PROGRAM} - {FIRST})") for line in body]
    head = [f"# {len(sources)} kernels like {sources[0].name} in one launch", "@triton.jit"]
    head.append(f"def {name}({', '.join(arguments)}):")
    return TritonKernelSource(
        name,
        "\n".join([*head, *("    " + line for line in lines)]),
        tuple(tensors),
        (),
        (Index(starts[-1]), indices.ONE),
        num_warps,
        first.num_stages,
        has_asserts=False,
        functions=first.functions,
        writes=frozenset().union(*(source.writes for source in written)),
        int64_index=int64_index,
        updates=tuple(dict.fromkeys(name for source in written for name in source.updates)),
        flushes_denormals=first.flushes_denormals,
        fused=tuple(source.name for source in sources),
    )


def _split_function(text: str) -> tuple[list[str], list[str]]:
    """The parameters of a kernel's text, and the lines of its body without their indentation."""
    lines = text.split("\n")
    start = next(k for k, line in enumerate(lines) if line.startswith("def "))
    names = lines[start].partition("(")[2].rpartition(")")[0].split(", ")
    return names, [line.removeprefix("    ") for line in lines[start + 1 :]]


def _write_search(leaves: list[list[str]], starts: list[int], low: int, high: int) -> list[str]:
    """The `if`s that run the lines of the kernel to which a program belongs."""
    if high - low == 1:
        return leaves[low]
    middle = (low + high) // 2
    return [
        f"if {PROGRAM} < {starts[middle]}:",
        *("    " + line for line in _write_search(leaves, starts, low, middle)),
        "else:",
        *("    " + line for line in _write_search(leaves, starts, middle, high)),
    ]
