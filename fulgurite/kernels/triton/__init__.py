"""Operators on GPUs, in Triton.

In: CUDA tensors (in Triton's interpreter: CPU tensors). Out: CUDA tensors, by the rules of the plain
torch references in `fulgurite.kernels` and `fulgurite.quant`, which the tests hold every kernel to.
Importing this folder needs triton.

    quantize.py     float tensors -> packed data and scales; quantize_nibbles.py: of 4 bits;
                    quantize_turned.py: of transposes
    linear.py       packed weights, activations of 16 bits or quantized on the fly; experts too
    scaled_mm.py    both operands packed: the library or a kernel; experts too
    tiles.py        which kernel, and which tile, for which sizes
    launch.py       packed operands -> a launch           packed.py    formats as kernels see them
    few_rows.py     the kernel for a few rows of x        matmul.py    the kernel for more
    few_step.py     its sums over K                       grouped_few.py, few_packed.py  of experts
    dequantize.py   packed numbers -> bfloat16            counters.py  for programs that share K
    numbers.py      device functions for casts            decode.py    device functions for matmuls
    routing.py      experts from logits or tokens         moe.py       pairs sorted by expert; sums
    grouped_matmul.py, grouped_step.py, moe_tiles.py      rows of tokens times their experts, gated
    attention.py    attention over paged keys and values  sampling.py  tokens from logits
"""
