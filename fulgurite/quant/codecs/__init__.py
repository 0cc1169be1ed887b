"""One codec per number-format family, in plain PyTorch.

In: float tensors. Out: codes (one per element) and scales, packed codes, and float tensors back.

    codec.py         format name -> quantize, dequantize, pack, unpack
    blocks.py        per-block maxima, scale expansion, nibble packing
    minifloat.py     rounding to e2m1, e4m3, e5m2 and e8m0
    fp8.py  nvfp4.py  mx.py  integer.py  cast.py  gguf.py     the families
    gguf_kquants.py  the scale search of the GGUF K-quants
"""
