import triton
import triton.language as tl


# sum_1[] = sum_r0,r1 arg0_1[r0,r1]
# rows: 1 x i<16777216, blocks of 8192 i, 32 warps, 1 pass over i, 512 splits
@triton.jit
def sum_0(arg0_1, sum_1_partials):
    sum_1_acc = tl.full([8192], 0.0, tl.float32)
    split = tl.program_id(1)
    for i0 in range(split * 32768, tl.minimum(split * 32768 + 32768, 16777216), 8192):
        i = i0 + tl.arange(0, 8192)
        arg0_1_i = tl.load(arg0_1 + i)
        sum_1_acc += arg0_1_i
    sum_1 = tl.sum(sum_1_acc, 0)
    tl.store(sum_1_partials + split, sum_1)


# combine: 1 x t<512, blocks of 512 t, 4 warps
@triton.jit
def sum_0_combine_all(sum_1_partials, sum_1_out):
    t = tl.arange(0, 512)
    sum_1_partials_t = tl.load(sum_1_partials + t)
    sum_1 = tl.sum(sum_1_partials_t, 0)
    tl.store(sum_1_out, sum_1)
