import triton
import triton.language as tl
from fulgurite.fuser.codegen.triton.device_functions import optimization_barrier


# _to_copy[i0,i1] = float32(arg0_1[i0,i1])
# var_mean_sum[i0] = sum_r1 _to_copy[i0,r1]
# var_mean_mean[i0] = (var_mean_sum[i0] / 50000.0)
# var_mean_squares[i0] = sum_r1 ((_to_copy[i0,r1] - var_mean_mean[i0]) * (_to_copy[i0,r1] - var_mean_mean[i0]))
# var_mean_variance[i0] = (var_mean_squares[i0] / 50000.0)
# add[i0] = (var_mean_variance[i0] + 1e-05)
# rsqrt[i0] = rsqrt(add[i0])
# sub[i0,i1] = (_to_copy[i0,i1] - var_mean_mean[i0])
# mul[i0,i1] = (sub[i0,i1] * rsqrt[i0])
# mul_1[i0,i1] = (mul[i0,i1] * arg1_1[i1])
# _to_copy_1[i0,i1] = bfloat16(mul_1[i0,i1])
# rows: i<300 x j<50000, blocks of 8192 j, 32 warps, 3 passes over j, 57344 register-resident
@triton.jit
def var_mean_rsqrt_0(arg0_1, arg1_1, _to_copy_1_out):
    i = tl.program_id(0)
    arg0_1_regs = ()
    for j0 in tl.static_range(0, 49152, 8192):
        j = j0 + tl.arange(0, 8192)
        arg0_1_regs += (tl.load(arg0_1 + i * 50000 + j),)
    for j0_2 in tl.static_range(49152, 50000, 8192):
        j = j0_2 + tl.arange(0, 8192)
        j_mask = j < 50000
        arg0_1_regs += (tl.load(arg0_1 + i * 50000 + j, mask=j_mask),)
    var_mean_sum_acc = tl.full([8192], 0.0, tl.float32)
    for j0_3 in tl.static_range(0, 49152, 8192):
        j = j0_3 + tl.arange(0, 8192)
        arg0_1_ij = arg0_1_regs[j0_3 // 8192].to(tl.float32)
        var_mean_sum_acc += arg0_1_ij
    for j0_4 in tl.static_range(49152, 50000, 8192):
        j = j0_4 + tl.arange(0, 8192)
        j_mask = j < 50000
        arg0_1_ij_2 = arg0_1_regs[j0_4 // 8192].to(tl.float32)
        var_mean_sum_acc += tl.where(j_mask, arg0_1_ij_2, 0.0)
    var_mean_sum = tl.sum(var_mean_sum_acc, 0)
    var_mean_mean = var_mean_sum / 50000.0
    var_mean_squares_acc = tl.full([8192], 0.0, tl.float32)
    for j0_5 in tl.static_range(0, 49152, 8192):
        j = j0_5 + tl.arange(0, 8192)
        arg0_1_ij_3 = optimization_barrier(arg0_1_regs[j0_5 // 8192], 1).to(tl.float32)
        var_mean_squares_acc += (arg0_1_ij_3 - var_mean_mean) * (arg0_1_ij_3 - var_mean_mean)
    for j0_6 in tl.static_range(49152, 50000, 8192):
        j = j0_6 + tl.arange(0, 8192)
        j_mask = j < 50000
        arg0_1_ij_4 = optimization_barrier(arg0_1_regs[j0_6 // 8192], 1).to(tl.float32)
        var_mean_squares_acc += tl.where(j_mask, (arg0_1_ij_4 - var_mean_mean) * (arg0_1_ij_4 - var_mean_mean), 0.0)
    var_mean_squares = tl.sum(var_mean_squares_acc, 0)
    var_mean_variance = var_mean_squares / 50000.0
    add = var_mean_variance + 1e-05
    rsqrt = tl.rsqrt(add)
    for j0_7 in tl.static_range(0, 49152, 8192):
        j = j0_7 + tl.arange(0, 8192)
        arg1_1_j = tl.load(arg1_1 + j).to(tl.float32)
        arg0_1_ij_5 = optimization_barrier(arg0_1_regs[j0_7 // 8192], 2).to(tl.float32)
        sub = arg0_1_ij_5 - var_mean_mean
        mul = sub * rsqrt
        mul_1 = mul * arg1_1_j
        tl.store(_to_copy_1_out + i * 50000 + j, mul_1)
    for j0_8 in tl.static_range(49152, 50000, 8192):
        j = j0_8 + tl.arange(0, 8192)
        j_mask = j < 50000
        arg1_1_j_2 = tl.load(arg1_1 + j, mask=j_mask).to(tl.float32)
        arg0_1_ij_6 = optimization_barrier(arg0_1_regs[j0_8 // 8192], 2).to(tl.float32)
        sub_2 = arg0_1_ij_6 - var_mean_mean
        mul_2 = sub_2 * rsqrt
        mul_1_2 = mul_2 * arg1_1_j_2
        tl.store(_to_copy_1_out + i * 50000 + j, mul_1_2, mask=j_mask)
