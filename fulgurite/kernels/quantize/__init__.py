"""Quantize and dequantize: a float tensor in, packed data and scales out, and back.

ops.py           the operator `quantize`: schema, checks, fake kernel, decomposition
reference.py     the same in plain torch
row_chunks.py    weights a few rows at a time
scale_layout.py  memory layout of scales
cpu.py           C++
triton_quantize.py    per tensor, row, block; triton_4bit.py, triton_bf16x2.py, triton_transpose.py
triton_dequantize.py  quantized operands to 16-bit floats
"""
