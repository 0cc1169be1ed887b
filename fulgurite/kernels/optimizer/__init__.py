"""Optimizer steps.

tensor_list.py           many tensors in one launch
triton_adamw.py          AdamW of bfloat16 weights with master bits, all in one launch
triton_muon.py           the elementwise parts of Muon, each in one launch for many matrices
triton_scale.py          gradients times a factor, all in one launch
triton_adamw_packed.py   AdamW with states in 8 or 16 bit, or stochastic rounding: a launch a parameter
"""

from __future__ import annotations
