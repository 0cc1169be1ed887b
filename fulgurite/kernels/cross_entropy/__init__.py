"""Cross entropy of rows of logits, with the gradient of the logits, in one pass over memory.

ops.py                   the function, and the table of kernels
reference.py             plain torch
triton_cross_entropy.py  one program a row
"""

from __future__ import annotations
