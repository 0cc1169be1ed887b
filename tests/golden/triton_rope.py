import triton
import triton.language as tl


# mul[i0,i1,i2,i3] = (arg0_1[i0,i1,i2,i3] * arg1_1[i2,i3])
# neg[i0,i1,i2,i3] = -arg0_1[i0,i1,i2,i3+32]
# cat[i0,i1,i2,i3] = where(0 <= i3 < 32, neg[i0,i1,i2,i3], arg0_1[i0,i1,i2,i3-32])
# mul_1[i0,i1,i2,i3] = (cat[i0,i1,i2,i3] * arg2_1[i2,i3])
# add[i0,i1,i2,i3] = (mul[i0,i1,i2,i3] + mul_1[i0,i1,i2,i3])
# pointwise: ij<2048 k<64, blocks of 4 ij x 64 k, 2 warps
@triton.jit
def neg_cat_0(arg1_1, arg0_1, arg2_1, add_out):
    program = tl.program_id(0)
    k = tl.arange(0, 64)[None, :]
    ij = (program * 4 + tl.arange(0, 4))[:, None]
    arg0_1_ijk = tl.load(arg0_1 + ij * 64 + k)
    arg1_1_ijk = tl.load(arg1_1 + k + (ij % 128) * 64)
    arg2_1_ijk = tl.load(arg2_1 + k + (ij % 128) * 64)
    mul = arg0_1_ijk * arg1_1_ijk
    in_bounds = k < 32
    arg0_1_ijk_2 = tl.load(arg0_1 + ij * 64 + k + 32, mask=in_bounds)
    arg0_1_ijk_3 = tl.load(arg0_1 + ij * 64 + k - 32, mask=~in_bounds)
    cat = tl.where(in_bounds, (-1.0 * arg0_1_ijk_2), arg0_1_ijk_3)
    mul_1 = cat * arg2_1_ijk
    add = mul + mul_1
    tl.store(add_out + ij * 64 + k, add)
