import triton
import triton.language as tl


# embedding[i0,i1,i2] = arg1_1[arg0_1[i0,i1],i2]
# mul[i0,i1,i2] = (embedding[i0,i1,i2] * 3.0)
# pointwise: ij<6400 k<512, blocks of 2 ij x 512 k, 4 warps
@triton.jit
def embedding_0(arg1_1, arg0_1, mul_out):
    program = tl.program_id(0)
    k = tl.arange(0, 512)[None, :]
    ij = (program * 2 + tl.arange(0, 2))[:, None]
    arg0_1_ij = tl.load(arg0_1 + ij)
    index = arg0_1_ij
    tl.device_assert((0 <= index) & (index < 5000), "index out of range")
    index = index.to(tl.int32)
    arg1_1_ijk = tl.load(arg1_1 + k + index * 512)
    mul = arg1_1_ijk * 3.0
    tl.store(mul_out + ij * 512 + k, mul)
