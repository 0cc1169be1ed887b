"""Grouped GEMM: rows sorted by expert in, each row times the weight of its expert out.

ops.py        the operators `grouped_gemm` and `grouped_wgrad`: schema, checks, gradients
args.py       `GroupedGemmArgs`, which every kernel takes
reference.py  the same in plain torch
cpu.py        C++
triton_grouped_gemm.py    chooses a kernel, and is the kernel for every kind of weight
triton_dense.py  triton_fp8.py  triton_4bit.py  triton_small_m.py      kernels for some of them
triton_mainloop.py  triton_tile_scheduler.py                           device functions
"""
