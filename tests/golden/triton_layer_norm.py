import triton
import triton.language as tl


# var_mean_sum[i0] = sum_r1 arg0_1[i0,r1]
# var_mean_mean[i0] = (var_mean_sum[i0] / 1024.0)
# var_mean_squares[i0] = sum_r1 ((arg0_1[i0,r1] - var_mean_mean[i0]) * (arg0_1[i0,r1] - var_mean_mean[i0]))
# var_mean_variance[i0] = (var_mean_squares[i0] / 1024.0)
# add[i0] = (var_mean_variance[i0] + 1e-05)
# rsqrt[i0] = rsqrt(add[i0])
# sub[i0,i1] = (arg0_1[i0,i1] - var_mean_mean[i0])
# mul[i0,i1] = (sub[i0,i1] * rsqrt[i0])
# mul_1[i0,i1] = (mul[i0,i1] * arg1_1[i1])
# add_1[i0,i1] = (mul_1[i0,i1] + arg1_1[i1])
# rows: i<4096 x j<1024, blocks of 1024 j, 1 warps
@triton.jit
def var_mean_rsqrt_0(arg0_1, arg1_1, add_1_out):
    i = tl.program_id(0)
    j = tl.arange(0, 1024)
    arg0_1_ij = tl.load(arg0_1 + i * 1024 + j)
    arg1_1_j = tl.load(arg1_1 + j)
    var_mean_sum = tl.sum(arg0_1_ij, 0)
    var_mean_mean = var_mean_sum / 1024.0
    sub = arg0_1_ij - var_mean_mean
    var_mean_squares = tl.sum((arg0_1_ij - var_mean_mean) * (arg0_1_ij - var_mean_mean), 0)
    var_mean_variance = var_mean_squares / 1024.0
    add = var_mean_variance + 1e-05
    rsqrt = tl.rsqrt(add)
    mul = sub * rsqrt
    mul_1 = mul * arg1_1_j
    add_1 = mul_1 + arg1_1_j
    tl.store(add_1_out + i * 1024 + j, add_1)
