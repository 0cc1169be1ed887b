"""Long and misaligned rows, the old way against the new one, right and fast: python3 benchmarks/sweep_rows.py OUT SECONDS.

Each line is a case and its candidates: percent of the copy's bandwidth and the relative error against eager. OUT (JSON lines)
has every candidate as soon as it is measured. Names of cases after SECONDS choose some. Without a GPU candidates are
written and compiled for an H200, nothing runs.
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
from sweep_triton import MACHINE, seconds

from fulgurite.bench import fusion_cases
from fulgurite.fuser.codegen.kernel_names import kernel_name
from fulgurite.fuser.codegen.triton.module import write_stages
from fulgurite.fuser.frontend import lower_graph
from fulgurite.fuser.ir import split_axes
from fulgurite.fuser.runtime import compile_triton, triton_region
from fulgurite.fuser.schedule.cpu.base import analyse
from fulgurite.fuser.schedule.cpu.rows import count_passes
from fulgurite.fuser.schedule.gpu import reductions
from fulgurite.fuser.schedule.gpu.aligned_rows import granule_of
from fulgurite.fuser.schedule.gpu.base import power_above, widest
from fulgurite.fuser.schedule.gpu.choose import choose_gpu_schedule, row_limit
from fulgurite.fuser.schedule.gpu.register_resident import KEPT_BLOCK
from fulgurite.fuser.schedule.online_reduction import online_sums, replaced_waits, squares_about
from fulgurite.fuser.segment import segment
from fulgurite.fuser.segment.build_loop_nest import build
from tests.fuser.support import trace

PLACE = "cuda" if torch.cuda.is_available() else "cpu"
POINTS = 64 << 20
BF16, F32 = torch.bfloat16, torch.float32


def softmax(x):
    return torch.softmax(x, -1)


def layer_norm(x, w):
    return torch.nn.functional.layer_norm(x, w.shape, w)


def rms_norm_backward(g, x, rstd, w):
    return fusion_cases.rms_norm_backward(g, x, rstd, w)


def cases():
    """Name, function, shapes and dtypes of its inputs."""
    for dtype, short in ((BF16, "bf16"), (F32, "f32")):
        for width in (4097, 4098, 32768, 49152, 50257, 65536, 73728, 98304, 131072):
            row = ((POINTS // width, width), dtype)
            yield f"rms {width} {short}", fusion_cases.rms_norm, (row, ((width,), dtype))
            if width in (4098, 32768, 49152, 50257, 65536, 131072):
                yield f"softmax {width} {short}", softmax, (row,)
            if width in (32768, 49152, 50257, 73728, 131072):
                yield f"layer_norm {width} {short}", layer_norm, (row, ((width,), dtype))
    for width in (8192, 16384):
        rows = POINTS // width
        row, one = ((rows, width), BF16), ((rows, 1), F32)
        yield f"rms backward {width}", rms_norm_backward, (row, row, one, ((width,), BF16))


def before(s):
    """The schedule that was chosen before rows were kept, aligned or made again."""
    if s.kind == "walking":
        return replace(s, remade=False, passes=1, stages=1 if s.remade else s.stages)
    (body,) = s.nest.body
    width = body.size.constant
    if power_above(width) <= reductions.MOST_HELD:
        held = power_above(width)
        warps = reductions.row_warps(s.nest, width, held)
        return replace(
            s, sizes={body: held}, looped=False, passes=1, warps=warps, kept=0, granule=0
        )
    facts = analyse(s.nest)
    online, about = online_sums(s.nest), squares_about(s.nest)
    passes = count_passes(s.nest, replaced_waits(s.nest, facts, online | about))
    group = max(16 // widest(s.nest), 1) if online else 1
    old = replace(s, sizes={body: 8192}, looped=True, passes=passes, online=online, about=about)
    return replace(old, warps=32, stages=1, kept=0, granule=0, back=False, group=group)


def whole(s, block, granule, **others):
    """All of a row kept, in blocks of this size."""
    (body,) = s.nest.body
    kept = -(-body.size.constant // block)
    return replace(s, sizes={body: block}, kept=kept, granule=granule, **others)


def candidates(s):
    """What is chosen, what was, and what else might be."""
    found = {"new": s, "old": before(s)}

    def add(name, changed):
        if changed not in found.values():
            found[name] = changed

    online = {} if s.kind == "walking" else online_sums(s.nest)
    if online and s.kept and not s.online:  # exponentials while the rest is on its way
        facts = replaced_waits(s.nest, analyse(s.nest), online)
        once = replace(s, passes=count_passes(s.nest, facts), online=online)
        add("online", replace(once, group=max(16 // widest(s.nest), 1)))
    if s.kind == "walking":
        passes = count_passes(s.nest, analyse(s.nest))
        add("again", replace(s, remade=True, passes=passes, stages=3))
    elif s.granule:
        (body,) = s.nest.body
        narrow = 8 // widest(s.nest)
        add("8 bytes", replace(s, granule=narrow))
        add("16 bytes", replace(s, granule=2 * narrow))
        if s.sizes[body] == KEPT_BLOCK:  # one access a thread and block: the last is less empty
            small = 1024 * narrow
            add("small", whole(s, small, narrow))
            add("small, 16 warps", whole(s, small, 2 * narrow, warps=16))
    elif s.looped and s.passes > 1:
        (body,) = s.nest.body
        part = s.kept * s.sizes[body] < body.size.constant
        if part:
            add("to and fro", replace(s, back=True))
            add("old, to and fro", replace(before(s), back=True))
        if s.kept and part:
            add("more kept", replace(s, kept=s.kept + max(s.kept // 4, 1)))
            add("fewer kept", replace(s, kept=max(s.kept // 2, 1)))
            add("fewer, to and fro", replace(s, kept=max(s.kept // 2, 1), back=True))
    elif s.sizes[s.nest.body[0]] == reductions.MOST_HELD:
        kept = reductions.kept_row(s.nest, analyse(s.nest))
        if kept is not None:
            add("kept", kept)
    elif granule_of(s.nest, 2):
        add("aligned", reductions.aligned_row(s.nest, analyse(s.nest)))
    return found


def prepared(function, shapes):
    """The region of a case, its name and candidates."""
    with torch.device(PLACE):
        inputs = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        region = split_axes.refine(lower_graph.read(trace(function, inputs)))
    parts = segment(region, row_limit(MACHINE))
    assert len(parts) == 1, f"{len(parts)} kernels"
    chosen = choose_gpu_schedule(build(region, parts[0]), MACHINE)
    return region, kernel_name(parts[0], 0), candidates(chosen)


def compiled(program):
    """None, or what went wrong."""
    from triton.backends.compiler import GPUTarget

    module = compile_triton.load_module(program.text)
    try:
        for stage in program.stages:
            function, target = getattr(module, stage.name), GPUTarget("cuda", 90, 32)
            compile_triton.compile_stage(function, stage, compile_triton.ALIGNED, target)
    except Exception as problem:  # a candidate that can't be is a result, too
        return repr(problem)[:200]
    return None


def copy_bandwidth():
    pairs = [torch.randn(2, POINTS, device="cuda", dtype=BF16) for _ in range(3)]
    taken = seconds([lambda p=p: p[0].copy_(p[1]) for p in pairs], 12, 15)
    return 2 * pairs[0][0].nbytes / taken


def measured(function, shapes, region, programs):
    """Name, seconds, relative error and bytes of each candidate."""
    torch.manual_seed(0)
    sets = [
        [torch.randn(shape, device="cuda").to(dtype) for shape, dtype in shapes] for _ in range(3)
    ]
    want = function(*sets[0])
    want = want if isinstance(want, tuple) else (want,)
    moved = sum(t.nbytes for t in (*sets[0], *want))
    for name, program in programs.items():
        call = triton_region.TritonRegion(
            region, lambda *_, p=program: p, (), torch.device("cuda", 0), False
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
            region, kernel, found = prepared(function, shapes)
            programs, jobs = {}, {}
            for candidate, schedule in found.items():
                stages = write_stages(kernel, schedule, MACHINE, False)
                programs[candidate] = compile_triton.make_program(stages)
                jobs[candidate] = pool.submit(compiled, programs[candidate])
            todo.append((name, function, shapes, region, found, programs, jobs))
        print(
            f"{sum(len(t[-1]) for t in todo)} candidates at {time.time() - begin:.0f} s", flush=True
        )
        wait(job for case in todo for job in case[-1].values())  # nothing is timed beside compilers
        copy = copy_bandwidth() if PLACE == "cuda" else 0.0
        print(f"copy {copy / 1e9:.0f} GB/s", flush=True)
        for name, function, shapes, region, found, programs, jobs in todo:
            if time.time() - begin > budget:
                print("out of time at", name, flush=True)
                break
            problems = {c: job.result() for c, job in jobs.items()}
            line = [f"{c} {problem}" for c, problem in problems.items() if problem]
            ready = {c: p for c, p in programs.items() if not problems[c]}
            if PLACE != "cuda":
                line += [f"{c} compiles" for c in ready]
            else:
                for c, taken, error, moved in measured(function, shapes, region, ready):
                    percent = 100 * moved / copy / taken
                    line.append(f"{c} {percent:.1f} (error {error:.0e})")
                    row = {"case": name, "candidate": c, "schedule": str(found[c])}
                    row |= {"percent": percent, "error": error, "bytes": moved, "copy": copy}
                    print(json.dumps(row), file=out, flush=True)
            print(f"{name:22} {'  '.join(line)}", flush=True)
    print(f"done at {time.time() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("FULGURITE_CACHE", tempfile.mkdtemp())
    main()
