"""Convolutions and linears of float32 tensors with packed weights, on the CPU.

In: a weight of a module whose weights do not change, packed once, and inputs. Out: the convolution or
linear, with bias, residual and activation in the same kernel.

    ops.py          the operators: schema, fake rule, reference
    gradients.py    those of transposed convolutions, and of gradients
    dense.py        those of convolutions whose weights change with each call, as in training
    matmul.py       float32 matmuls of training
    packing.py      weights → panels of the C++ kernel
    activations.py  the activations of the epilogue
    cpu.py          calls of the C++ kernel (`include/conv.h`)
    direct.py       the same functions without torch's dispatcher
"""
