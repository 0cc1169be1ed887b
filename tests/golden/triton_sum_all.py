import triton
import triton.language as tl


# sum_1[] = sum_r0,r1 arg0_1[r0,r1]
# rows: 1 x i<16777216, blocks of 8192 i, 32 warps, 1 walk over i, 512 parts
@triton.jit
def sum_0(arg0_1, sum_1_parts):
    sum_1_sums = tl.full([8192], 0.0, tl.float32)
    part = tl.program_id(1)
    for i0 in range(part * 32768, tl.minimum(part * 32768 + 32768, 16777216), 8192):
        i = i0 + tl.arange(0, 8192)
        arg0_1_i = tl.load(arg0_1 + i)
        sum_1_sums += arg0_1_i
    sum_1 = tl.sum(sum_1_sums, 0)
    tl.store(sum_1_parts + part, sum_1)


# finish: 1 x t<512, blocks of 512 t, 4 warps
@triton.jit
def sum_0_finish_all(sum_1_parts, sum_1_out):
    t = tl.arange(0, 512)
    sum_1_parts_t = tl.load(sum_1_parts + t)
    sum_1 = tl.sum(sum_1_parts_t, 0)
    tl.store(sum_1_out, sum_1)
