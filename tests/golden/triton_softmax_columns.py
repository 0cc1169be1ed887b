import triton
import triton.language as tl
from triton.language.extra import libdevice
from fulgurite.fuser.codegen.triton.device_functions import nan_max, softmax_div


# amax[i1] = max_r0 arg0_1[r0,i1]
# sub[i0,i1] = (arg0_1[i0,i1] - amax[i1])
# exp[i0,i1] = exp(sub[i0,i1])
# sum_1[i1] = sum_r0 exp[r0,i1]
# div[i0,i1] = (exp[i0,i1] / sum_1[i1])
# columns: i<1024 x j<512, blocks of 512 j x 8 i, 4 warps
@triton.jit
def amax_exp_sum_0(arg0_1, div_out):
    i = (tl.program_id(0) * 8 + tl.arange(0, 8))[None, :]
    j = tl.arange(0, 512)[:, None]
    arg0_1_ij = tl.load(arg0_1 + i + j * 1024)
    amax = tl.reduce(arg0_1_ij, 0, nan_max, keep_dims=True)
    sub = arg0_1_ij - amax
    exp = libdevice.exp(sub)
    sum_1 = tl.sum(exp, 0, keep_dims=True)
    div = softmax_div(exp, sum_1)
    tl.store(div_out + i + j * 1024, div)
