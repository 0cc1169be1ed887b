"""Rare garbage collections, in every process of the tests.

TorchDynamo makes many objects that live on. With Python's thresholds (700, 10, 10), collections take an
eighth of the CPU time of compiling a small transformer.
"""

import gc

gc.set_threshold(50_000, 10, 3)
