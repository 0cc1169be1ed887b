import triton
import triton.language as tl
from triton.language.extra import libdevice


# silu[i0,i1] = (arg0_1[i0,i1] / (1.0 + exp(-arg0_1[i0,i1])))
# mul[i0,i1] = (silu[i0,i1] * arg1_1[i0,i1])
# pointwise: i<4194304, blocks of 2048 i, 4 warps
@triton.jit
def silu_0(arg0_1, arg1_1, mul_out):
    i = tl.program_id(0) * 2048 + tl.arange(0, 2048)
    arg0_1_i = tl.load(arg0_1 + i).to(tl.float32)
    arg1_1_i = tl.load(arg1_1 + i).to(tl.float32)
    silu = arg0_1_i / (1.0 + libdevice.fast_expf(-1.0 * arg0_1_i))
    mul = silu * arg1_1_i
    tl.store(mul_out + i, mul)
