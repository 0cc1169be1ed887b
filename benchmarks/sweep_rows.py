"""Times schedules of long and unaligned rows: python3 benchmarks/sweep_rows.py OUT SECONDS [CASE ...].

Each line is a case and its candidates: percent of the copy bandwidth and the relative error against
eager. OUT (JSON lines) has every candidate as soon as it is measured. Without a GPU, candidates are only
written and compiled for an H200.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import torch

sys.path.insert(0, ".")
from sweep_triton import H200, seconds

from fulgurite.bench.fusions import gpu_cases
from fulgurite.fuser.codegen.triton.kernel import write_kernels
from fulgurite.fuser.frontend import lower_graph
from fulgurite.fuser.ir import split_axes
from fulgurite.fuser.lowering import name_kernel
from fulgurite.fuser.runtime import compile_triton, triton_region
from fulgurite.fuser.schedule.analysis import analyze_nest, count_passes
from fulgurite.fuser.schedule.gpu.base import max_itemsize, next_power_of_two
from fulgurite.fuser.schedule.gpu.choose import choose_gpu_schedule, make_row_limit
from fulgurite.fuser.schedule.gpu.peel import choose_peel_width
from fulgurite.fuser.schedule.gpu.rows import (
    choose_online_group,
    choose_row_warps,
    schedule_peeled_rows,
    schedule_resident_rows,
)
from fulgurite.fuser.schedule.online_reduction import (
    find_online_softmax,
    find_welford,
    merge_online_passes,
)
from fulgurite.fuser.segment import segment_region
from fulgurite.fuser.segment.build_loop_nest import build_loop_nest
from fulgurite.kernels.tuning import fuser_gpu as tuning
from tests.fuser.support import trace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POINTS = 64 << 20
BF16, F32 = torch.bfloat16, torch.float32


def softmax(x):
    return torch.softmax(x, -1)


def layer_norm(x, w):
    return torch.nn.functional.layer_norm(x, w.shape, w)


def rms_norm_backward(g, x, rstd, w):
    return gpu_cases.rms_norm_backward(g, x, rstd, w)


def cases():
    """Name, function, shapes and dtypes of its inputs."""
    for dtype, short in ((BF16, "bf16"), (F32, "f32")):
        for width in (4097, 4098, 32768, 49152, 50257, 65536, 73728, 98304, 131072):
            row = ((POINTS // width, width), dtype)
            yield f"rms {width} {short}", gpu_cases.rms_norm, (row, ((width,), dtype))
            if width in (4098, 32768, 49152, 50257, 65536, 131072):
                yield f"softmax {width} {short}", softmax, (row,)
            if width in (32768, 49152, 50257, 73728, 131072):
                yield f"layer_norm {width} {short}", layer_norm, (row, ((width,), dtype))
    for width in (8192, 16384):
        rows = POINTS // width
        row, one = ((rows, width), BF16), ((rows, 1), F32)
        yield f"rms backward {width}", rms_norm_backward, (row, row, one, ((width,), BF16))


def make_baseline(s):
    """The schedule without resident, peeled or rematerialized rows."""
    if s.kind == "persistent":
        num_stages = 1 if s.rematerializes else s.num_stages
        return replace(s, rematerializes=False, passes=1, num_stages=num_stages)
    (body,) = s.nest.body
    width = body.size.constant
    block = next_power_of_two(width)
    if block <= tuning.MAX_ROW_BLOCK:
        return replace(
            s,
            block_sizes={body: block},
            is_looped=False,
            passes=1,
            num_warps=choose_row_warps(s.nest, width, block),
            resident_blocks=0,
            peel_width=0,
        )
    online, welford = find_online_softmax(s.nest), find_welford(s.nest)
    merged = merge_online_passes(s.nest, analyze_nest(s.nest), online | welford)
    return replace(
        s,
        block_sizes={body: 8192},
        is_looped=True,
        passes=count_passes(s.nest, merged),
        online_softmax=online,
        welford=welford,
        num_warps=32,
        num_stages=1,
        resident_blocks=0,
        peel_width=0,
        alternates_direction=False,
        online_group=choose_online_group(s.nest, online),
    )


def use_resident_blocks(s, block, peel_width, **changes):
    """All of a row register-resident, in blocks of this size."""
    (body,) = s.nest.body
    blocks = -(-body.size.constant // block)
    return replace(
        s, block_sizes={body: block}, resident_blocks=blocks, peel_width=peel_width, **changes
    )


def make_candidates(s):
    """The chosen schedule, the baseline, and alternatives, by name."""
    found = {"chosen": s, "baseline": make_baseline(s)}

    def add(name, schedule):
        if schedule not in found.values():
            found[name] = schedule

    online = {} if s.kind == "persistent" else find_online_softmax(s.nest)
    if online and s.resident_blocks and not s.online_softmax:
        merged = merge_online_passes(s.nest, analyze_nest(s.nest), online)
        add(
            "online softmax",
            replace(
                s,
                passes=count_passes(s.nest, merged),
                online_softmax=online,
                online_group=choose_online_group(s.nest, online),
            ),
        )
    if s.kind == "persistent":
        passes = count_passes(s.nest, analyze_nest(s.nest))
        add("rematerialized", replace(s, rematerializes=True, passes=passes, num_stages=3))
    elif s.peel_width:
        (body,) = s.nest.body
        narrow = 8 // max_itemsize(s.nest)
        add("8 bytes", replace(s, peel_width=narrow))
        add("16 bytes", replace(s, peel_width=2 * narrow))
        if s.block_sizes[body] == tuning.RESIDENT_BLOCK:
            # one access a thread and block: the last block is less empty
            small = 1024 * narrow
            add("small blocks", use_resident_blocks(s, small, narrow))
            wide = use_resident_blocks(s, small, 2 * narrow, num_warps=16)
            add("small blocks, 16 warps", wide)
    elif s.is_looped and s.passes > 1:
        (body,) = s.nest.body
        is_partly_resident = s.resident_blocks * s.block_sizes[body] < body.size.constant
        if is_partly_resident:
            alternating = replace(make_baseline(s), alternates_direction=True)
            add("alternating", replace(s, alternates_direction=True))
            add("baseline, alternating", alternating)
        if s.resident_blocks and is_partly_resident:
            more = s.resident_blocks + max(s.resident_blocks // 4, 1)
            fewer = max(s.resident_blocks // 2, 1)
            add("more resident", replace(s, resident_blocks=more))
            add("fewer resident", replace(s, resident_blocks=fewer))
            both = replace(s, resident_blocks=fewer, alternates_direction=True)
            add("fewer resident, alternating", both)
    elif s.block_sizes[s.nest.body[0]] == tuning.MAX_ROW_BLOCK:
        resident = schedule_resident_rows(s.nest, analyze_nest(s.nest))
        if resident is not None:
            add("resident", resident)
    elif choose_peel_width(s.nest, 2):
        add("peeled", schedule_peeled_rows(s.nest, analyze_nest(s.nest)))
    return found


def prepare(function, shapes):
    """The region of a case, its name and candidates."""
    with torch.device(DEVICE):
        inputs = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        region = split_axes.split_axes(lower_graph.lower_graph(trace(function, inputs)))
    segments = segment_region(region, make_row_limit(H200))
    assert len(segments) == 1, f"{len(segments)} kernels"
    schedule = choose_gpu_schedule(build_loop_nest(region, segments[0]), H200)
    return region, name_kernel(segments[0], 0), make_candidates(schedule)


def compile_module(module):
    """None, or what went wrong."""
    from triton.backends.compiler import GPUTarget

    loaded = compile_triton.load_module(module.text)
    try:
        for source in module.kernels:
            function, target = getattr(loaded, source.name), GPUTarget("cuda", 90, 32)
            compile_triton.compile_for_target(function, source, compile_triton.ALIGNED, target)
    except Exception as problem:  # a candidate that does not compile is a result, too
        return repr(problem)[:200]
    return None


def copy_bandwidth():
    pairs = [torch.randn(2, POINTS, device="cuda", dtype=BF16) for _ in range(3)]
    taken = seconds([lambda p=p: p[0].copy_(p[1]) for p in pairs], 12, 15)
    return 2 * pairs[0][0].nbytes / taken


def measure_all(function, shapes, region, modules):
    """Name, seconds, relative error and bytes of each candidate."""
    torch.manual_seed(0)
    sets = [
        [torch.randn(shape, device="cuda").to(dtype) for shape, dtype in shapes] for _ in range(3)
    ]
    want = function(*sets[0])
    want = want if isinstance(want, tuple) else (want,)
    moved = sum(t.nbytes for t in (*sets[0], *want))
    for name, module in modules.items():
        call = triton_region.TritonRegion(
            region, lambda *_, m=module: m, (), torch.device("cuda", 0), False
        )
        error = 0.0
        for a, b in zip(call(*sets[0]), want, strict=True):
            error = max(error, float((a.double() - b.double()).norm() / b.double().norm()))
        yield name, seconds([lambda c=call, g=g: c(*g) for g in sets]), error, moved


def main():
    with open(sys.argv[1], "w") as out:
        sweep(out, float(sys.argv[2]), sys.argv[3:])


def sweep(out, budget, only):
    begin = time.time()
    todo = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, function, shapes in cases():
            if only and name not in only:
                continue
            region, kernel, found = prepare(function, shapes)
            modules, jobs = {}, {}
            for candidate, schedule in found.items():
                sources = write_kernels(kernel, schedule, False)
                modules[candidate] = compile_triton.build_kernel_module(sources)
                jobs[candidate] = pool.submit(compile_module, modules[candidate])
            todo.append((name, function, shapes, region, found, modules, jobs))
        print(
            f"{sum(len(t[-1]) for t in todo)} candidates at {time.time() - begin:.0f} s", flush=True
        )
        wait(job for case in todo for job in case[-1].values())  # nothing is timed beside compilers
        copy = copy_bandwidth() if DEVICE == "cuda" else 0.0
        print(f"copy {copy / 1e9:.0f} GB/s", flush=True)
        for name, function, shapes, region, found, modules, jobs in todo:
            if time.time() - begin > budget:
                print("out of time at", name, flush=True)
                break
            problems = {c: job.result() for c, job in jobs.items()}
            line = [f"{c} {problem}" for c, problem in problems.items() if problem]
            ready = {c: p for c, p in modules.items() if not problems[c]}
            if DEVICE != "cuda":
                line += [f"{c} compiles" for c in ready]
            else:
                for c, taken, error, moved in measure_all(function, shapes, region, ready):
                    percent = 100 * moved / copy / taken
                    line.append(f"{c} {percent:.1f} (error {error:.0e})")
                    row = {"case": name, "candidate": c, "schedule": str(found[c])}
                    row |= {"percent": percent, "error": error, "bytes": moved, "copy": copy}
                    print(json.dumps(row), file=out, flush=True)
            print(f"{name:22} {'  '.join(line)}", flush=True)
    print(f"done at {time.time() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("FULGURITE_CACHE_DIR", tempfile.mkdtemp())
    main()
