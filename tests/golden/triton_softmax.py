import triton
import triton.language as tl
from triton.language.extra import libdevice
from fulgurite.fuser.codegen.triton.device_functions import nan_max, softmax_div


# amax[i0] = max_r1 arg0_1[i0,r1]
# sub[i0,i1] = (arg0_1[i0,i1] - amax[i0])
# exp[i0,i1] = exp(sub[i0,i1])
# sum_1[i0] = sum_r1 exp[i0,r1]
# div[i0,i1] = (exp[i0,i1] / sum_1[i0])
# rows: i<4096 x j<1024, blocks of 1024 j, 1 warps
@triton.jit
def amax_exp_sum_0(arg0_1, div_out):
    i = tl.program_id(0)
    j = tl.arange(0, 1024)
    arg0_1_ij = tl.load(arg0_1 + i * 1024 + j)
    amax = tl.reduce(arg0_1_ij, 0, nan_max)
    sub = arg0_1_ij - amax
    exp = libdevice.exp(sub)
    sum_1 = tl.sum(exp, 0)
    div = softmax_div(exp, sum_1)
    tl.store(div_out + i * 1024 + j, div)
