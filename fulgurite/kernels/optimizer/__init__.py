"""Optimizer steps in one kernel a parameter.

triton_adamw.py          AdamW of bfloat16 weights with master bits
triton_adamw_packed.py   AdamW with states in 8 or 16 bit, or stochastic rounding
triton_scale.py          gradients times a factor
"""

from __future__ import annotations
