"""The fuser's IR: statements over axes, expressions, affine indices, loop nests.

In: nothing of torch but dtypes. Out: values that the frontend builds and every later step reads. `interpreter.py` runs
the IR in plain torch: the reference of every schedule and code generator.
"""
