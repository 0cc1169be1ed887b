"""C++ code generation: `translation_unit.py` writes a region's kernels, one file a kernel shape.

In: `CpuSchedule`s. Out: a `TranslationUnit`. The text needs no headers but those of
`fulgurite/include`, which become part of it.
"""
