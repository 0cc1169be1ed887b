import triton
import triton.language as tl
from triton.language.extra import libdevice
from fulgurite.fuser.codegen.triton.device_functions import nan_max


# amax[i0] = max_r1 arg0_1[i0,r1]
# sub[i0,i1] = (arg0_1[i0,i1] - amax[i0])
# exp[i0,i1] = exp(sub[i0,i1])
# sum_1[i0] = sum_r1 exp[i0,r1]
# log[i0] = log(sum_1[i0])
# sub_1[i0,i1] = (sub[i0,i1] - log[i0])
# ne[i0] = (arg1_1[i0] != -100)
# scalar_tensor[] = 0
# where[i0] = where(ne[i0], arg1_1[i0], scalar_tensor[])
# gather[i0] = sub_1[i0,where[i0]]
# neg[i0] = -gather[i0]
# ne_1[i0] = (arg1_1[i0] != -100)
# scalar_tensor_1[] = 0.0
# where_1[i0] = where(ne_1[i0], neg[i0], scalar_tensor_1[])
# ne_2[i0] = (arg1_1[i0] != -100)
# sum_2[] = sum_r0 int64(ne_2[r0])
# _to_copy[] = float32(sum_2[])
# sum_3[] = sum_r0 where_1[r0]
# div[] = (sum_3[] / _to_copy[])
# persistent: i<512 x j<1000, blocks of 1024 j, 2 warps, 512 programs
@triton.jit
def amax_exp_sum_0(arg1_1, arg0_1, sum_3_partials, sum_2_partials):
    program = tl.program_id(0)
    j = tl.arange(0, 1024)
    j_mask = j < 1000
    sum_3_partial = tl.full([], 0.0, tl.float32)
    sum_2_partial = tl.full([], 0, tl.int64)
    for i in range(program, 512, 512):
        arg1_1_i = tl.load(arg1_1 + i)
        arg0_1_ij = tl.load(arg0_1 + i * 1000 + j, mask=j_mask)
        ne_1 = arg1_1_i != (-100)
        ne = arg1_1_i != (-100)
        where = tl.where(ne, arg1_1_i, 0)
        amax = tl.reduce(tl.where(j_mask, arg0_1_ij, float("-inf")), 0, nan_max)
        index = where
        tl.device_assert((0 <= index) & (index < 1000), "index out of range")
        index = index.to(tl.int32)
        arg0_1_i = tl.load(arg0_1 + i * 1000 + index)
        sub = arg0_1_i - amax
        sub_at2 = arg0_1_ij - amax
        exp = libdevice.exp(sub_at2)
        sum_1 = tl.sum(tl.where(j_mask, exp, 0.0), 0)
        log = tl.log(sum_1)
        sub_1 = sub - log
        neg = -1.0 * sub_1
        where_1 = tl.where(ne_1, neg, 0.0)
        sum_3_partial += where_1
        ne_2 = arg1_1_i != (-100)
        sum_2_partial += ne_2.to(tl.int64)
    tl.store(sum_3_partials + program, sum_3_partial)
    tl.store(sum_2_partials + program, sum_2_partial)


# combine: 1 x t<512, blocks of 512 t, 4 warps
@triton.jit
def amax_exp_sum_0_combine_all(sum_3_partials, sum_2_partials, div_out):
    t = tl.arange(0, 512)
    sum_3_partials_t = tl.load(sum_3_partials + t)
    sum_2_partials_t = tl.load(sum_2_partials + t)
    sum_3 = tl.sum(sum_3_partials_t, 0)
    sum_2 = tl.sum(sum_2_partials_t, 0)
    _to_copy = sum_2.to(tl.float32)
    div = tl.div_rn(sum_3, _to_copy)
    tl.store(div_out, div)
