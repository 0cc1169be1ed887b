"""Triton code generation: `kernel.py` writes a kernel, `module.py` a region's Python module.

In: `GpuSchedule`s. Out: `TritonKernelSource`s, and the text of a module that Triton compiles. In
these files `w` is the `KernelWriter` of a kernel and `b` its `KernelBody`, the text below its
`def`.
"""
