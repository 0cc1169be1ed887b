import triton
import triton.language as tl


# pow_1[i0,i1] = (arg0_1[i0,i1] * arg0_1[i0,i1])
# mean_sum[i0] = sum_r1 pow_1[i0,r1]
# mean[i0] = (mean_sum[i0] / 1024.0)
# add[i0] = (mean[i0] + 9.999999974752427e-07)
# rsqrt[i0] = rsqrt(add[i0])
# mul[i0,i1] = (arg0_1[i0,i1] * rsqrt[i0])
# mul_1[i0,i1] = (mul[i0,i1] * arg1_1[i1])
# rows: i<4096 x j<1024, blocks of 1024 j, 1 warps
@triton.jit
def pow_mean_rsqrt_0(arg0_1, arg1_1, mul_1_out):
    i = tl.program_id(0)
    j = tl.arange(0, 1024)
    arg0_1_ij = tl.load(arg0_1 + i * 1024 + j)
    arg1_1_j = tl.load(arg1_1 + j)
    pow_1 = arg0_1_ij * arg0_1_ij
    mean_sum = tl.sum(pow_1, 0)
    mean = mean_sum / 1024.0
    add = mean + 9.999999974752427e-07
    rsqrt = tl.rsqrt(add)
    mul = arg0_1_ij * rsqrt
    mul_1 = mul * arg1_1_j
    tl.store(mul_1_out + i * 1024 + j, mul_1)
