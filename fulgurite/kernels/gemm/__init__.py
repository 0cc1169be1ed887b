"""GEMM with quantized operands, and fused dense projections: x and a weight in, x @ weight.T out.

    quant_linear.py       `quant_linear`: the weight quantized, x as it is or quantized on the fly
    scaled_mm.py          `scaled_mm`: both operands quantized
    fp8_linear.py         `fp8_linear`: forward and both backward GEMMs of training in FP8
    fused_projections.py  qkv and gate_up projections as one GEMM
    modules.py            `QuantLinear`, `QuantEmbedding`
    reference.py          the operators in plain torch

CPU:     cpu_linear.py  cpu_scaled_mm.py  cpu_layout.py (weights packed for vectors)  cpu_layout_cache.py
Triton:  triton_quant_linear.py and triton_scaled_mm.py choose a kernel; triton_launch.py launches
         triton_gemm.py  many rows         triton_small_m.py, triton_small_m_mainloop.py  few rows
         triton_gguf.py  GGUF blocks       triton_fused_linear*.py, triton_gemv.py        dense weights
"""
