"""Schedules: how the loops of a kernel run on the hardware.

In: a `LoopNest` and a device. Out: a schedule, the nest with its loops ordered and every decision
made (SIMD axis, block sizes, passes, warps). Code generators print a schedule and decide nothing.

    analysis.py          which pass over the body computes which value
    loop_order.py        the order of loops
    online_reduction.py  online softmax and Welford: two dependent reductions in one pass
    cpu/                 C++ kernels: `choose_cpu_schedule`
    gpu/                 Triton kernels: `choose_gpu_schedule`

The numbers that schedules compare with are in `kernels/tuning/fuser_cpu.py` and `fuser_gpu.py`.
"""
