import triton
import triton.language as tl


# mul[i0,i1] = (arg0_1[i0,i1] * 2.0)
# sum_1[i1] = sum_r0 mul[r0,i1]
# columns: i<4096 x j<4096, blocks of 128 j x 32 i, 4 warps, 1 pass over j, 4 splits, 3 stages
@triton.jit
def sum_0(arg0_1, sum_1_partials):
    i = (tl.program_id(0) * 32 + tl.arange(0, 32))[None, :]
    sum_1_acc = tl.full([128, 32], 0.0, tl.float32)
    split = tl.program_id(1)
    for j0 in tl.range(split * 1024, tl.minimum(split * 1024 + 1024, 4096), 128, num_stages=3):
        j = (j0 + tl.arange(0, 128))[:, None]
        arg0_1_ij = tl.load(arg0_1 + i + j * 4096)
        mul = arg0_1_ij * 2.0
        sum_1_acc += mul
    sum_1 = tl.sum(sum_1_acc, 0, keep_dims=True)
    tl.store(sum_1_partials + split * 4096 + i, sum_1)


# combine: i<4096 x t<4, blocks of 4 t x 16 i, 4 warps
@triton.jit
def sum_0_combine(sum_1_partials, sum_1_out):
    i = (tl.program_id(0) * 16 + tl.arange(0, 16))[None, :]
    t = tl.arange(0, 4)[:, None]
    sum_1_partials_it = tl.load(sum_1_partials + i + t * 4096)
    sum_1 = tl.sum(sum_1_partials_it, 0, keep_dims=True)
    tl.store(sum_1_out + i, sum_1)
