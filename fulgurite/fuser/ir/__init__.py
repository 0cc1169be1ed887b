"""The fuser's IR: statements over axes, expressions, indices and loop nests.

In: nothing of torch but dtypes. Out: the values that the frontend builds and every later step
reads. `interpreter.py` runs the IR in plain torch. It is the reference for every schedule and code
generator.
"""
