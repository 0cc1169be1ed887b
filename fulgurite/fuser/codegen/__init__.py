"""Code generators: a scheduled loop nest to the source text of a kernel.

In: a schedule. Out: text, with the tensors and sizes that the kernel takes. Code generators decide
nothing.

    cpp/      C++ for CPUs: one translation unit a region
    triton/   Triton for GPUs: one Python module a region
"""
