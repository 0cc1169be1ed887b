import triton
import triton.language as tl


# mul[i0,i1] = (arg0_1[i0,i1] * 2.0)
# sum_1[i1] = sum_r0 mul[r0,i1]
# columns: i<4096 x j<4096, blocks of 128 j x 32 i, 4 warps, 1 walk over j, 4 parts, 3 blocks ahead
@triton.jit
def sum_0(arg0_1, sum_1_parts):
    i = (tl.program_id(0) * 32 + tl.arange(0, 32))[None, :]
    sum_1_sums = tl.full([128, 32], 0.0, tl.float32)
    part = tl.program_id(1)
    for j0 in tl.range(part * 1024, tl.minimum(part * 1024 + 1024, 4096), 128, num_stages=3):
        j = (j0 + tl.arange(0, 128))[:, None]
        arg0_1_ij = tl.load(arg0_1 + i + j * 4096)
        mul = arg0_1_ij * 2.0
        sum_1_sums += mul
    sum_1 = tl.sum(sum_1_sums, 0, keep_dims=True)
    tl.store(sum_1_parts + part * 4096 + i, sum_1)


# finish: i<4096 x t<4, blocks of 4 t x 16 i, 4 warps
@triton.jit
def sum_0_finish(sum_1_parts, sum_1_out):
    i = (tl.program_id(0) * 16 + tl.arange(0, 16))[None, :]
    t = tl.arange(0, 4)[:, None]
    sum_1_parts_it = tl.load(sum_1_parts + i + t * 4096)
    sum_1 = tl.sum(sum_1_parts_it, 0, keep_dims=True)
    tl.store(sum_1_out + i, sum_1)
