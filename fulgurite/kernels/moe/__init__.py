"""Mixture of experts: hidden states in, the weighted sum of each token's experts out.

ops.py            `sort_by_expert`, `experts_forward`, `combine`, and `fused_experts`, all in one
routing.py        `route`, `route_tokens`: logits or tokens to experts and weights
router_config.py  `RouterConfig`, `Routes`
small_batch.py    the arguments of the kernels for a few tokens
reference.py      the operators in plain torch
cpu.py            C++
triton_routing.py  triton_moe.py            routing; sorting and combining
triton_small_batch.py  triton_small_batch_quantized.py  triton_small_batch_routing.py
"""
