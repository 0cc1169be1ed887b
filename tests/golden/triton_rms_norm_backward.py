import triton
import triton.language as tl


# pow_1[i0,i1] = (arg1_1[i0,i1] * arg1_1[i0,i1])
# mean_sum[i0] = sum_r1 pow_1[i0,r1]
# mean[i0] = (mean_sum[i0] / 512.0)
# add[i0] = (mean[i0] + 1e-06)
# rsqrt[i0] = rsqrt(add[i0])
# mul[i0,i1] = (arg1_1[i0,i1] * rsqrt[i0])
# mul_1[i0,i1] = (arg0_1[i0,i1] * arg2_1[i1])
# mul_2[i0,i1] = (mul_1[i0,i1] * mul[i0,i1])
# mean_1_sum[i0] = sum_r1 mul_2[i0,r1]
# mean_1[i0] = (mean_1_sum[i0] / 512.0)
# mul_3[i0,i1] = (mul[i0,i1] * mean_1[i0])
# sub[i0,i1] = (mul_1[i0,i1] - mul_3[i0,i1])
# mul_4[i0,i1] = (rsqrt[i0] * sub[i0,i1])
# mul_5[i0,i1] = (arg0_1[i0,i1] * mul[i0,i1])
# sum_1[i1] = sum_r0 mul_5[r0,i1]
# persistent: i<4096 x j<512, blocks of 2 i x 512 j, 2 warps, 256 programs, 4 stages
@triton.jit
def pow_mean_rsqrt_0(arg1_1, arg2_1, arg0_1, mul_4_out, sum_1_partials):
    program = tl.program_id(0)
    j = tl.arange(0, 512)[None, :]
    arg2_1_j = tl.load(arg2_1 + j)
    sum_1_partial = tl.full([2, 512], 0.0, tl.float32)
    for i0 in tl.range(program * 2, 4096, 512, num_stages=4):
        i = (i0 + tl.arange(0, 2))[:, None]
        arg1_1_ij = tl.load(arg1_1 + i * 512 + j)
        arg0_1_ij = tl.load(arg0_1 + i * 512 + j)
        pow_1 = arg1_1_ij * arg1_1_ij
        mean_sum = tl.sum(pow_1, 1, keep_dims=True)
        mean = mean_sum / 512.0
        add = mean + 1e-06
        rsqrt = tl.rsqrt(add)
        mul_1 = arg0_1_ij * arg2_1_j
        mul = arg1_1_ij * rsqrt
        mul_2 = mul_1 * mul
        mean_1_sum = tl.sum(mul_2, 1, keep_dims=True)
        mean_1 = mean_1_sum / 512.0
        mul_3 = mul * mean_1
        sub = mul_1 - mul_3
        mul_4 = rsqrt * sub
        mul_5 = arg0_1_ij * mul
        sum_1_partial += mul_5
        tl.store(mul_4_out + i * 512 + j, mul_4)
    sum_1_partial = tl.sum(sum_1_partial, 0, keep_dims=True)
    tl.store(sum_1_partials + program * 512 + j, sum_1_partial)


# combine: j<512 x t<256, blocks of 256 t x 16 j, 8 warps
@triton.jit
def pow_mean_rsqrt_0_combine(sum_1_partials, sum_1_out):
    j = (tl.program_id(0) * 16 + tl.arange(0, 16))[None, :]
    t = tl.arange(0, 256)[:, None]
    sum_1_partials_jt = tl.load(sum_1_partials + j + t * 512)
    sum_1 = tl.sum(sum_1_partials_jt, 0, keep_dims=True)
    tl.store(sum_1_out + j, sum_1)
