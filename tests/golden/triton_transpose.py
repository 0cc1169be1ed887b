import triton
import triton.language as tl


# add[i0,i1] = (arg0_1[i1,i0] + 1.0)
# clone[i0,i1] = add[i0,i1]
# transpose: i<2000 j<1000, blocks of 64 i x 64 j, 4 warps
@triton.jit
def add_clone_0(arg0_1, clone_out):
    program = tl.program_id(0)
    j = (program % 16 * 64 + tl.arange(0, 64))[None, :]
    j_mask = j < 1000
    i = ((program // 16) * 64 + tl.arange(0, 64))[:, None]
    i_mask = i < 2000
    arg0_1_ij = tl.load(arg0_1 + i + j * 2000, mask=i_mask & j_mask)
    add = arg0_1_ij + 1.0
    tl.store(clone_out + i * 1000 + j, add, mask=i_mask & j_mask)
