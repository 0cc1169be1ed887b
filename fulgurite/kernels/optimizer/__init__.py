"""Optimizer steps in one kernel a parameter.

triton_adamw.py   AdamW of bfloat16 weights with master bits
"""

from __future__ import annotations
