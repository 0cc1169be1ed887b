import triton
import triton.language as tl
from fulgurite.fuser.codegen.triton.device_functions import sigmoid


# add[i0,i1] = (arg0_1[i0,i1] + arg1_1[i1])
# gelu[i0,i1] = ((0.5 * add[i0,i1]) * (1.0 + tanh((0.7978845608028654 * (add[i0,i1] + (0.044715 * ((add[i0,i1] * add[i0,i1]) * add[i0,i1])))))))
# pointwise: i<4096 j<1024, blocks of 1024 j, 4 warps
@triton.jit
def gelu_0(arg1_1, arg0_1, gelu_out):
    program = tl.program_id(0)
    j = tl.arange(0, 1024)
    i = program
    arg0_1_ij = tl.load(arg0_1 + i * 1024 + j)
    arg1_1_j = tl.load(arg1_1 + j)
    add = arg0_1_ij + arg1_1_j
    gelu = (0.5 * add) * (2.0 * sigmoid(2.0 * (0.7978845608028654 * (add + (0.044715 * ((add * add) * add))))))
    tl.store(gelu_out + i * 1024 + j, gelu)
