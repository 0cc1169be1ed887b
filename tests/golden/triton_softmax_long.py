import triton
import triton.language as tl
from triton.language.extra import libdevice
from fulgurite.fuser.codegen.triton.device_functions import nan_max, optimization_barrier


# _to_copy[i0,i1] = float32(arg0_1[i0,i1])
# amax[i0] = max_r1 _to_copy[i0,r1]
# sub[i0,i1] = (_to_copy[i0,i1] - amax[i0])
# exp[i0,i1] = exp(sub[i0,i1])
# sum_1[i0] = sum_r1 exp[i0,r1]
# div[i0,i1] = (exp[i0,i1] / sum_1[i0])
# _to_copy_1[i0,i1] = bfloat16(div[i0,i1])
# rows: i<300 x j<100000, blocks of 8192 j, 32 warps, 3 passes over j, 98304 register-resident
@triton.jit
def amax_exp_sum_0(arg0_1, _to_copy_1_out):
    i = tl.program_id(0)
    arg0_1_regs = ()
    for j0 in tl.static_range(0, 98304, 8192):
        j = j0 + tl.arange(0, 8192)
        arg0_1_regs += (tl.load(arg0_1 + i * 100000 + j),)
    amax_acc = tl.full([8192], float("-inf"), tl.float32)
    for j0_2 in range(98304, 100000, 8192):
        j = j0_2 + tl.arange(0, 8192)
        j_mask = j < 100000
        arg0_1_ij = tl.load(arg0_1 + i * 100000 + j, mask=j_mask).to(tl.float32)
        amax_acc = nan_max(amax_acc, tl.where(j_mask, arg0_1_ij, float("-inf")))
    for j0_3 in tl.static_range(0, 98304, 8192):
        j = j0_3 + tl.arange(0, 8192)
        arg0_1_ij_2 = arg0_1_regs[j0_3 // 8192].to(tl.float32)
        amax_acc = nan_max(amax_acc, arg0_1_ij_2)
    amax = tl.reduce(amax_acc, 0, nan_max)
    sum_1_acc = tl.full([8192], 0.0, tl.float32)
    for j0_4 in tl.static_range(0, 98304, 8192):
        j = j0_4 + tl.arange(0, 8192)
        arg0_1_ij_3 = optimization_barrier(arg0_1_regs[j0_4 // 8192], 1).to(tl.float32)
        sub = arg0_1_ij_3 - amax
        exp = libdevice.fast_expf(sub)
        sum_1_acc += exp
    for j0_5 in range(98304, 100000, 8192):
        j = j0_5 + tl.arange(0, 8192)
        j_mask = j < 100000
        arg0_1_ij_4 = tl.load(arg0_1 + i * 100000 + j, mask=j_mask).to(tl.float32)
        sub_2 = arg0_1_ij_4 - amax
        exp_2 = libdevice.fast_expf(sub_2)
        sum_1_acc += tl.where(j_mask, exp_2, 0.0)
    sum_1 = tl.sum(sum_1_acc, 0)
    for j0_6 in tl.static_range(0, 98304, 8192):
        j = j0_6 + tl.arange(0, 8192)
        arg0_1_ij_5 = optimization_barrier(arg0_1_regs[j0_6 // 8192], 2).to(tl.float32)
        sub_3 = arg0_1_ij_5 - amax
        exp_3 = libdevice.fast_expf(sub_3)
        div = exp_3 * (1.0 / sum_1)
        tl.store(_to_copy_1_out + i * 100000 + j, div)
    for j0_7 in range(98304, 100000, 8192):
        j = j0_7 + tl.arange(0, 8192)
        j_mask = j < 100000
        arg0_1_ij_6 = tl.load(arg0_1 + i * 100000 + j, mask=j_mask).to(tl.float32)
        sub_4 = arg0_1_ij_6 - amax
        exp_4 = libdevice.fast_expf(sub_4)
        div_2 = exp_4 * (1.0 / sum_1)
        tl.store(_to_copy_1_out + i * 100000 + j, div_2, mask=j_mask)
