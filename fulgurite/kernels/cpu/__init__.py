"""C++ for the CPU: packed weights in, laid out for vectors once; linears of them out.

layout.py       QuantTensor -> `Panels`: 16 rows interleaved, blocks of 32 columns
linear.py       `quant_linear`, and prepared calls for an engine
products.py     `scaled_mm` and the experts' linears, around it
grouped_matmul.py  rows of tokens times their experts' matrices, dense or packed, and the gate
moe.py          experts chosen, pairs sorted by expert, rows summed
library.py      the C++ of packed linears as a loaded library, its structures as ctypes
weight.h  activations.h  linear.h  read.h         what is read, what x becomes, the kernels
simd_avx512.h  simd_avx2.h  simd_plain.h          sixteen rows at a time, by machine
attention.*  glue.*  vectors.h                    attention over pages and what lies between linears
moe.h  grouped_matmul.h  grouped_linear.h         experts; the last one with packed weights
"""
