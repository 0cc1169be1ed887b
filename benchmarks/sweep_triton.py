"""Times schedules around the chosen one for every fusion case: python3 benchmarks/sweep_triton.py OUT SECONDS."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import replace

import torch

sys.path.insert(0, ".")
from fulgurite import device
from fulgurite.bench import fusion_cases
from fulgurite.fuser.codegen.kernel_names import kernel_name
from fulgurite.fuser.codegen.triton.module import write_stages
from fulgurite.fuser.frontend import lower_graph
from fulgurite.fuser.ir import split_axes
from fulgurite.fuser.runtime import compile_triton, triton_region
from fulgurite.fuser.schedule.cpu.base import analyse
from fulgurite.fuser.schedule.cpu.rows import count_passes
from fulgurite.fuser.schedule.gpu.choose import choose_gpu_schedule, row_limit
from fulgurite.fuser.segment import segment
from fulgurite.fuser.segment.build_loop_nest import build
from tests.fuser.support import trace

MACHINE = device.Device("H200", 132, 4.2e12, 2.9e13, 256 << 10, 50 << 20, (torch.float32,))


def variants(s, wide=True):
    """Schedules around one."""
    found = [s]

    def add(sizes=None, **changes):
        sizes = {**s.sizes, **(sizes or {})}
        new = replace(s, sizes=sizes, **changes)
        if new not in found:
            found.append(new)

    if s.kind == "pointwise":
        (inner,) = s.blocks
        for block in (512, 1024, 2048, 4096):
            for warps in (2, 4, 8, 16):
                if 4 <= block // (warps * 32) <= 16:
                    add({inner: block}, warps=warps)
    elif s.kind == "transpose":
        a, b = s.blocks
        for x in (32, 64, 128):
            for y in (32, 64, 128):
                for warps in (4, 8):
                    add({a: x, b: y}, warps=warps)
    elif s.kind == "rows" and not s.looped:
        body = s.nest.body[0]
        (grid,) = s.nest.grid
        held = s.sizes[body]
        for rows in (1, 2, 4, 8, 16):
            for warps in (1, 2, 4, 8, 16, 32):
                if rows * held > 4096 and rows > 1:
                    continue
                if not 8 <= rows * held // (32 * warps) <= 64:
                    continue
                blocks = (body,) if rows == 1 else (grid, body)
                add({grid: rows}, warps=warps, blocks=blocks)
        if held == 8192 and s.nest.body[0].size.constant < held:
            for block, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 16)):
                add({body: block}, looped=True, passes=LOOPED[s.nest.formulas], warps=warps)
        if held >= 16384:
            for block in (4096, 8192):
                for warps in (8, 16):
                    for ahead in (1, 3):
                        add(
                            {body: block},
                            looped=True,
                            passes=LOOPED[s.nest.formulas],
                            warps=warps,
                            stages=ahead,
                        )
    elif s.kind == "rows":
        (body,) = s.blocks
        for block in (2048, 4096, 8192):
            for warps in (4, 8, 16, 32):
                for ahead in (1, 3):
                    if 8 <= block // (warps * 32) <= 16:
                        add({body: block}, warps=warps, stages=ahead)
    elif s.kind == "columns" and s.looped:
        body, vector = s.blocks
        for across in (32, 64, 128, 256):
            for deep in (8, 16, 32, 64, 128):
                for warps in (4, 8):
                    for split in (4, 8, 16, 32, 64):
                        for ahead in (1, 3):
                            tasks = split * 4096 // across
                            if across * deep == 4096 and 264 <= tasks <= 132 * 8:
                                add(
                                    {body: deep, vector: across},
                                    warps=warps,
                                    split=split,
                                    stages=ahead,
                                )
    elif s.kind == "walking" and s.looped:
        (body,) = s.blocks
        for block in (1024, 2048, 4096, 8192):
            for warps in (2, 4, 8, 16):
                for ahead in (1, 2, 3, 4):
                    for group in (1, s.group):
                        if 8 <= block // (warps * 32) <= 32:
                            add({body: block}, warps=warps, stages=ahead, group=group)
    elif s.kind == "walking":
        for programs in (132, 256):
            for warps in (s.warps // 2, s.warps, s.warps * 2):
                for stages in (1, 2, 3, 4):
                    if 1 <= warps <= 32:
                        add(programs=programs, warps=warps, stages=stages)
    return found


LOOPED = {}


def prepared(case):
    torch.manual_seed(0)
    inputs = case.inputs()
    with torch.device("cuda"):
        graph = trace(case.function, inputs)
    region = split_axes.refine(lower_graph.read(graph))
    parts = segment(region, row_limit(MACHINE))
    assert len(parts) == 1, f"{case.name}: {len(parts)} kernels"
    chosen = choose_gpu_schedule(build(region, parts[0]), MACHINE)
    if chosen.nest.body:
        facts = analyse(chosen.nest)
        LOOPED[chosen.nest.formulas] = count_passes(chosen.nest, facts)
    return inputs, region, kernel_name(parts[0], 0), chosen


def compile_one(job):
    text, stages = job
    from triton.backends.compiler import GPUTarget

    module = compile_triton.load_module(text)
    for stage in stages:
        try:
            compile_triton.compile_stage(
                getattr(module, stage.name), stage, 1, GPUTarget("cuda", 90, 32)
            )
        except Exception as error:  # a variant that can't be is a result, too
            return repr(error)[:300]
    return None


def seconds(calls, calls_a_batch=8, repeats=7):
    """Of one call: batches of calls that take turns over several sets of inputs."""
    for call in calls:
        call()
    events = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for k in range(calls_a_batch):
            calls[k % len(calls)]()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) / 1e3 for a, b in events)
    return times[len(times) // 2] / calls_a_batch


def extra():
    """Norms, forward and backward, softmax and an elementwise function over many widths."""
    cases = []

    def add(name, function, make):
        cases.append(("s", fusion_cases.Case(name, function, make)))

    for dtype, short in ((torch.bfloat16, "bf16"), (torch.float32, "f32")):
        for width in (128, 512, 768, 1024, 2048, 5120, 8192, 16384, 32768, 73728):
            rows = (64 << 20) // width
            make = fusion_cases.normal((rows, width), (width,), dtype=dtype)
            add(f"rms {width} {short}", fusion_cases.rms_norm, make)
        for width in (16384, 65536, 131072):
            make = fusion_cases.normal(((64 << 20) // width, width), dtype=dtype)
            add(f"softmax {width} {short}", lambda x: torch.softmax(x, -1), make)
        for width in (4098, 4100, 4104, 50257):
            make = fusion_cases.normal((16384 * 4096 // width, width), (width,), dtype=dtype)
            add(f"relu_bias {width} {short}", lambda x, b: torch.relu(x + b), make)
            add(f"rms {width} {short}", fusion_cases.rms_norm, make)
    for width in (768, 1024, 2048, 5120, 8192, 16384):
        rows = (64 << 20) // width
        make = lambda rows=rows, width=width: fusion_cases.rms_norm_saved((rows, width))  # noqa: E731
        add(f"rms backward {width}", fusion_cases.rms_norm_backward, make)
    wide = fusion_cases.normal((16384, 4096), dtype=torch.float32)
    add("transpose f32", lambda x: (x.t() + 1).contiguous(), wide)
    add("columns f32", lambda x: x.sum(0), wide)
    add("all f32", lambda x: x.sum(), wide)
    add("scaled and summed", lambda x: (x * 2, x.sum()), wide)
    return cases


def main():
    out, budget = sys.argv[1], float(sys.argv[2])
    begin = time.time()
    only = sys.argv[3:]
    pairs = [torch.randn(2, 16384 * 4096, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    copies = [lambda p=p: p[0].copy_(p[1]) for p in pairs]
    copy = 2 * pairs[0].nbytes / 2 / seconds(copies, 12, 15)
    del pairs, copies
    print(f"copy {copy / 1e9:.0f} GB/s")
    groups = [("f", c) for c in fusion_cases.forward()]
    groups += [("b", c) for c in fusion_cases.backward()]
    groups = extra() if only == ["sizes"] else groups
    jobs, todo = [], []
    for kind, case in groups:
        if only and only != ["sizes"] and f"{kind}:{case.name}" not in only:
            continue
        try:
            inputs, region, name, base = prepared(case)
        except Exception as error:
            print(f"{kind}:{case.name} can't: {error!r}"[:200])
            continue
        del inputs
        programs = []
        for schedule in variants(base):
            stages = write_stages(name, schedule, MACHINE, False)
            program = compile_triton.make_program(stages)
            programs.append((schedule, program))
            jobs.append((program.text, program.stages))
        todo.append((kind, case, region, programs))
    print(f"{len(jobs)} variants at {time.time() - begin:.0f} s")
    with multiprocessing.get_context("spawn").Pool(16) as pool:
        problems = pool.map(compile_one, jobs, chunksize=2)
    print(f"compiled at {time.time() - begin:.0f} s, {sum(p is not None for p in problems)} failed")
    for p in list(dict.fromkeys(p for p in problems if p))[:3]:
        print(p)
    problem = iter(problems)
    rows = []
    for kind, case, region, programs in todo:
        bad = [next(problem) for _ in programs]
        if time.time() - begin > budget:
            print("out of time at", case.name)
            break
        torch.manual_seed(0)
        inputs = case.inputs()
        bytes_in = sum(t.nbytes for t in inputs)
        sets = [
            inputs,
            *([t.clone() for t in inputs] for _ in range(2 if bytes_in < 8 << 30 else 0)),
        ]
        with torch.no_grad():
            want = case.function(*inputs)
        found = []
        for (schedule, program), failed in zip(programs, bad):
            if failed:
                continue
            try:
                call = triton_region.TritonRegion(
                    region, lambda *_, p=program: p, (), torch.device("cuda", 0), False
                )
                got = call(*inputs)
                error = 0.0
                if schedule is programs[0][0] and "dropout" not in case.name:
                    results = want if isinstance(want, tuple) else (want,)
                    for a, b in zip(got, results):
                        scale = b.float().norm() + 1e-9
                        error = max(error, float((a.float() - b.float()).norm() / scale))
                got = None
                taken = seconds([lambda call=call, given=given: call(*given) for given in sets])
            except Exception as problem_:
                print(f"{case.name} {schedule}: {problem_!r}"[:300])
                continue
            found.append([taken, str(schedule), error])
        moved = sum(t.numel() * t.element_size() for t in inputs) - case.unread
        results = want if isinstance(want, tuple) else (want,)
        moved += sum(t.numel() * t.element_size() for t in results)
        if not found:
            continue
        chosen = found[0]
        best = min(found)
        percent = [100 * moved / copy / x[0] for x in (chosen, best)]
        print(
            f"{kind}:{case.name} {percent[0]:.0f} best {percent[1]:.0f} err {chosen[2]:.1e} {best[1][:110]}"
        )
        rows.append({"case": f"{kind}:{case.name}", "bytes": moved, "copy": copy, "found": found})
        del inputs, want, results, sets
        torch.cuda.empty_cache()
    with open(out, "w") as file:
        json.dump(rows, file, indent=1)
    print(f"done at {time.time() - begin:.0f} s")


if __name__ == "__main__":
    os.environ.setdefault("FULGURITE_CACHE", tempfile.mkdtemp())
    main()
