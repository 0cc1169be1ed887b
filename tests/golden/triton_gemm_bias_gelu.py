import triton
import triton.language as tl
from fulgurite.fuser.codegen.triton.device_functions import fast_sigmoid


# addmm_gemm[i,j] = sum_k arg0_1[i,k] * arg1_1[k,j]
# add_tensor[i0,i1] = (addmm_gemm[i0,i1] + arg2_1[i1])
# gelu[i0,i1] = ((0.5 * add_tensor[i0,i1]) * (1.0 + tanh((0.7978845608028654 * (add_tensor[i0,i1] + (0.044715 * ((add_tensor[i0,i1] * add_tensor[i0,i1]) * add_t
# gemm: i<8192 j<4096 x 1024, tiles of 128 x 256 x 64, 8 warps, 3 stages, TMA loads, persistent: 132 programs, flattened tile loop
@triton.jit
def mm_add_gelu(arg0_1, arg1_1, arg2_1, gelu_out):
    program = tl.program_id(0)
    arg0_1_desc = tl.make_tensor_descriptor(arg0_1, [8192, 1024], [1024, 1], [128, 64])
    arg1_1_desc = tl.make_tensor_descriptor(arg1_1, [4096, 1024], [1024, 1], [256, 64])
    for tile in tl.range(program, 1024, 132, flatten=True):
        first_pid_m = tile // 128 * 8
        pid_m = first_pid_m + tile % 128 % 8
        pid_n = tile % 128 // 8
        addmm_gemm_acc = tl.zeros([128, 256], tl.float32)
        for k0 in range(0, 1024, 64):
            arg0_1_tile = arg0_1_desc.load([pid_m * 128, k0])
            addmm_gemm_acc = tl.dot(arg0_1_tile, arg1_1_desc.load([pid_n * 256, k0]).T, addmm_gemm_acc)
        i = (pid_m * 128 + tl.arange(0, 128))[:, None]
        j = (pid_n * 256 + tl.arange(0, 256))[None, :]
        arg2_1_j = tl.load(arg2_1 + j).to(tl.float32)
        add_tensor = addmm_gemm_acc + arg2_1_j
        gelu = add_tensor * fast_sigmoid(1.5957691216057308 * (add_tensor + (0.044715 * ((add_tensor * add_tensor) * add_tensor))))
        tl.store(gelu_out + i * 4096 + j, gelu)
