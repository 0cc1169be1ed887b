"""GEMM fusion: matmuls and the elementwise ops that read them, as one kernel.

In: a claimed Trace on a GPU. Out: the same trace at stage "gemm_fusion", with fused GEMMs scheduled; at
lowering, one Triton kernel for each.

    fusion.py      the step: candidates, decision, marks       heuristics.py  is it faster?
    frontend.py    fx graph with GEMMs → IR                    schedule.py    the epilogue over output tiles
    fast_math.py   cheaper activations for epilogues           codegen.py     schedule → Triton
    lower.py       region → kernel, or the library's GEMM and a kernel
"""
