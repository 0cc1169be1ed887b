import triton
import triton.language as tl
from fulgurite.fuser.codegen.triton_functions import nan_max


# _to_copy[i0,i1] = float32(arg0_1[i0,i1])
# amax[i0] = max_r1 _to_copy[i0,r1]
# sub[i0,i1] = (_to_copy[i0,i1] - amax[i0])
# exp[i0,i1] = exp(sub[i0,i1])
# sum_1[i0] = sum_r1 exp[i0,r1]
# div[i0,i1] = (exp[i0,i1] / sum_1[i0])
# _to_copy_1[i0,i1] = bfloat16(div[i0,i1])
# rows: i<300 x j<100000, blocks of 8192 j, 32 warps, 2 walks over j, maximum and exponentials together
@triton.jit
def amax_exp_sum_0(arg0_1, _to_copy_1_out):
    i = tl.program_id(0)
    amax_all = tl.full([1024], (-3.4028234663852886e+38), tl.float32)
    sum_1_sums = tl.full([1024], 0.0, tl.float32)
    for j0 in range(0, 98304, 8192):
        j = j0 + tl.arange(0, 8192)
        arg0_1_ij = tl.load(arg0_1 + i * 100000 + j).to(tl.float32)
        groups = tl.reshape(arg0_1_ij, [1024, 8])
        best = nan_max(amax_all, tl.reduce(groups, 1, nan_max))
        scale = tl.exp(amax_all - best)
        sum_1_sums = sum_1_sums * scale + tl.sum(tl.exp2(groups * 1.4426950408889634 - (best * 1.4426950408889634)[:, None]), 1)
        amax_all = best
    for j0_2 in range(98304, 100000, 8192):
        j = j0_2 + tl.arange(0, 8192)
        j_in = j < 100000
        arg0_1_ij_2 = tl.load(arg0_1 + i * 100000 + j, mask=j_in).to(tl.float32)
        groups_2 = tl.reshape(tl.where(j_in, arg0_1_ij_2, float("-inf")), [1024, 8])
        best_2 = nan_max(amax_all, tl.reduce(groups_2, 1, nan_max))
        scale_2 = tl.exp(amax_all - best_2)
        sum_1_sums = sum_1_sums * scale_2 + tl.sum(tl.exp2(groups_2 * 1.4426950408889634 - (best_2 * 1.4426950408889634)[:, None]), 1)
        amax_all = best_2
    amax = tl.reduce(amax_all, 0, nan_max)
    amax = tl.where(amax == (-3.4028234663852886e+38), float("-inf"), amax)
    sum_1 = tl.sum(sum_1_sums * tl.exp(amax_all - amax), 0)
    for j0_3 in range(0, 98304, 8192):
        j = j0_3 + tl.arange(0, 8192)
        arg0_1_ij_3 = tl.load(arg0_1 + i * 100000 + j).to(tl.float32)
        sub = arg0_1_ij_3 - amax
        exp = tl.exp(sub)
        div = exp / sum_1
        tl.store(_to_copy_1_out + i * 100000 + j, div)
    for j0_4 in range(98304, 100000, 8192):
        j = j0_4 + tl.arange(0, 8192)
        j_in = j < 100000
        arg0_1_ij_4 = tl.load(arg0_1 + i * 100000 + j, mask=j_in).to(tl.float32)
        sub_2 = arg0_1_ij_4 - amax
        exp_2 = tl.exp(sub_2)
        div_2 = exp_2 / sum_1
        tl.store(_to_copy_1_out + i * 100000 + j, div_2, mask=j_in)
