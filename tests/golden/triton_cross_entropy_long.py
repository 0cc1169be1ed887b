import triton
import triton.language as tl
from triton.language.extra import libdevice
from fulgurite.fuser.codegen.triton.device_functions import nan_max


# _to_copy[i0,i1] = float32(arg0_1[i0,i1])
# amax[i0] = max_r1 _to_copy[i0,r1]
# sub[i0,i1] = (_to_copy[i0,i1] - amax[i0])
# exp[i0,i1] = exp(sub[i0,i1])
# sum_1[i0] = sum_r1 exp[i0,r1]
# log[i0] = log(sum_1[i0])
# sub_1[i0,i1] = (sub[i0,i1] - log[i0])
# _to_copy_1[i0,i1] = bfloat16(sub_1[i0,i1])
# ne[i0] = (arg1_1[i0] != -100)
# scalar_tensor[] = 0
# where[i0] = where(ne[i0], arg1_1[i0], scalar_tensor[])
# gather[i0] = _to_copy_1[i0,where[i0]]
# neg[i0] = -gather[i0]
# ne_1[i0] = (arg1_1[i0] != -100)
# scalar_tensor_1[] = 0.0
# where_1[i0] = where(ne_1[i0], neg[i0], scalar_tensor_1[])
# rows: i<300 x j<128256, blocks of 4096 j, 8 warps, 1 pass over j, online softmax
@triton.jit
def amax_exp_sum_0(arg1_1, arg0_1, where_1_out):
    i = tl.program_id(0)
    arg1_1_i = tl.load(arg1_1 + i)
    ne_1 = arg1_1_i != (-100)
    ne = arg1_1_i != (-100)
    where = tl.where(ne, arg1_1_i, 0)
    index = where
    tl.device_assert((0 <= index) & (index < 128256), "index out of range")
    index = index.to(tl.int32)
    arg0_1_i = tl.load(arg0_1 + i * 128256 + index).to(tl.float32)
    amax_acc = tl.full([512], float("-inf"), tl.float32)
    sum_1_acc = tl.full([512], 0.0, tl.float32)
    for j0 in range(0, 126976, 4096):
        j = j0 + tl.arange(0, 4096)
        arg0_1_ij = tl.load(arg0_1 + i * 128256 + j).to(tl.float32)
        groups = tl.reshape(arg0_1_ij, [512, 8])
        new_max = nan_max(amax_acc, tl.reduce(groups, 1, nan_max))
        shift = tl.maximum(new_max, tl.full([], (-3.4028234663852886e+38), tl.float32))
        scale = tl.exp(amax_acc - shift)
        sum_1_acc = sum_1_acc * scale + tl.sum(libdevice.fast_expf(groups - shift[:, None]), 1)
        amax_acc = new_max
    for j0_2 in range(126976, 128256, 4096):
        j = j0_2 + tl.arange(0, 4096)
        j_mask = j < 128256
        arg0_1_ij_2 = tl.load(arg0_1 + i * 128256 + j, mask=j_mask).to(tl.float32)
        groups_2 = tl.reshape(tl.where(j_mask, arg0_1_ij_2, float("-inf")), [512, 8])
        new_max_2 = nan_max(amax_acc, tl.reduce(groups_2, 1, nan_max))
        shift_2 = tl.maximum(new_max_2, tl.full([], (-3.4028234663852886e+38), tl.float32))
        scale_2 = tl.exp(amax_acc - shift_2)
        sum_1_acc = sum_1_acc * scale_2 + tl.sum(libdevice.fast_expf(groups_2 - shift_2[:, None]), 1)
        amax_acc = new_max_2
    amax = tl.reduce(amax_acc, 0, nan_max)
    sum_1 = tl.sum(sum_1_acc * tl.exp(amax_acc - amax), 0)
    sub = arg0_1_i - amax
    log = tl.log(sum_1)
    sub_1 = sub - log
    _to_copy_1 = sub_1.to(tl.bfloat16).to(tl.float32)
    neg = -1.0 * _to_copy_1
    where_1 = tl.where(ne_1, neg, 0.0)
    tl.store(where_1_out + i, where_1)
