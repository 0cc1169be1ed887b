import triton
import triton.language as tl


# var_mean_sum[i1] = sum_r0,r2 arg0_1[r0,i1,r2]
# var_mean_mean[i0] = (var_mean_sum[i0] / 784.0)
# var_mean_squares[i1] = sum_r0,r2 ((arg0_1[r0,i1,r2] - var_mean_mean[i1]) * (arg0_1[r0,i1,r2] - var_mean_mean[i1]))
# var_mean_variance[i0] = (var_mean_squares[i0] / 784.0)
# mul[i0] = (arg1_1[i0] * 0.9)
# mul_1[i0] = (var_mean_mean[i0] * 0.1)
# add[i0] = (mul[i0] + mul_1[i0])
# mul_2[i0] = (arg2_1[i0] * 0.9)
# mul_3[i0] = (var_mean_variance[i0] * 0.1)
# add_1[i0] = (mul_2[i0] + mul_3[i0])
# sub[i0,i1,i2] = (arg0_1[i0,i1,i2] - var_mean_mean[i1])
# add_2[i0] = (var_mean_variance[i0] + 1e-05)
# rsqrt[i0] = rsqrt(add_2[i0])
# mul_4[i0,i1,i2] = (sub[i0,i1,i2] * rsqrt[i1])
# arg1_1_new[i0] = add[i0]
# arg2_1_new[i0] = add_1[i0]
# rows: i<256 x jk<784, blocks of 1024 jk, 1 warps
@triton.jit
def var_mean_rsqrt_copy_0(arg0_1, arg1_1, arg2_1, mul_4_out):
    i = tl.program_id(0)
    jk = tl.arange(0, 1024)
    jk_mask = jk < 784
    arg0_1_ijk = tl.load(arg0_1 + i * 49 + (jk % 49) + (jk // 49) * 12544, mask=jk_mask)
    arg1_1_i = tl.load(arg1_1 + i)
    arg2_1_i = tl.load(arg2_1 + i)
    var_mean_sum = tl.sum(tl.where(jk_mask, arg0_1_ijk, 0.0), 0)
    var_mean_mean = tl.div_rn(var_mean_sum, 784.0)
    sub = arg0_1_ijk - var_mean_mean
    var_mean_squares = tl.sum(tl.where(jk_mask, (arg0_1_ijk - var_mean_mean) * (arg0_1_ijk - var_mean_mean), 0.0), 0)
    var_mean_variance = tl.div_rn(var_mean_squares, 784.0)
    add_2 = var_mean_variance + 1e-05
    rsqrt = tl.rsqrt(add_2)
    mul_4 = sub * rsqrt
    mul = arg1_1_i * 0.9
    mul_1 = var_mean_mean * 0.1
    add = mul + mul_1
    mul_2 = arg2_1_i * 0.9
    mul_3 = var_mean_variance * 0.1
    add_1 = mul_2 + mul_3
    tl.store(mul_4_out + i * 49 + (jk % 49) + (jk // 49) * 12544, mul_4, mask=jk_mask)
    tl.store(arg1_1 + i, add)
    tl.store(arg2_1 + i, add_1)
