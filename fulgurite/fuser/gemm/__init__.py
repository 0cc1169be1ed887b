"""GEMM fusion: matmuls with their epilogue in one Triton kernel.

In: a region that holds matmuls and elementwise ops. Out: a scheduled, generated kernel, or the reason to call the
library instead.
"""
