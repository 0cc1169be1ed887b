"""Operators that are written by hand: tensors in, tensors out, opaque to capture.

Each is a torch custom op (`fulgurite.op`) with a rule for FakeTensors and a reference in plain torch
that is the oracle of its tests and runs on every device. What runs faster on a device stands in the
operator's own table, `IMPLEMENTATIONS`: device type -> "module:function", imported when it is first
asked for (see `implementations.py`).

    quantize.py      a float tensor -> packed data and scales, by one of `fulgurite.quant.FORMATS`
    quant_linear.py  x @ weight.T + bias, the weight packed, x as it is or quantized on the fly
    scaled_mm.py     a @ b.T + bias, both packed, every layout of scales
    grouped.py       the last two for experts: rows of x by expert, ends of the groups on the device
    routing.py       logits -> each token's experts and their weights, by the rule of any family
    grouped_matmul.py  rows of tokens times their experts' matrices, dense or packed, and the gate
    moe.py           a mixture of experts: pairs sorted by expert, both matmuls, the weighted sum
    fp8_linear.py    a linear layer whose forward and both backward matmuls are in FP8
    cpu/             C++ for the CPU: packed weights laid out for vectors, linears of them
    triton/          the same operators on GPUs
"""
