import triton
import triton.language as tl
from fulgurite.fuser.codegen.triton.device_functions import fast_sigmoid


# mm[i,j] = sum_k arg0_1[i,k] * arg1_1[k,j]
# silu[i0,i1] = (mm[i0,i1] / (1.0 + exp(-mm[i0,i1])))
# mul[i0,i1] = (silu[i0,i1] * mm[i0,i1+2048])
# gemm: i<8192 j<2048 x 1024, tiles of 128 x 128 x 64 of 2 GEMMs, 8 warps, 3 stages, TMA loads, persistent: 132 programs, plain tile loop
@triton.jit
def mm_silu_mul(arg0_1, arg1_1, mul_out):
    program = tl.program_id(0)
    arg0_1_desc = tl.make_tensor_descriptor(arg0_1, [8192, 1024], [1024, 1], [128, 64])
    arg1_1_desc = tl.make_tensor_descriptor(arg1_1, [4096, 1024], [1024, 1], [128, 64])
    for tile in tl.range(program, 1024, 132):
        first_pid_m = tile // 128 * 8
        pid_m = first_pid_m + tile % 128 % 8
        pid_n = tile % 128 // 8
        mm_acc = tl.zeros([128, 128], tl.float32)
        mm_at2048_acc = tl.zeros([128, 128], tl.float32)
        for k0 in range(0, 1024, 64):
            arg0_1_tile = arg0_1_desc.load([pid_m * 128, k0])
            mm_acc = tl.dot(arg0_1_tile, arg1_1_desc.load([pid_n * 128, k0]).T, mm_acc)
            mm_at2048_acc = tl.dot(arg0_1_tile, arg1_1_desc.load([pid_n * 128 + 2048, k0]).T, mm_at2048_acc)
        i = (pid_m * 128 + tl.arange(0, 128))[:, None]
        j = (pid_n * 128 + tl.arange(0, 128))[None, :]
        silu = mm_acc * fast_sigmoid(mm_acc)
        mul = silu * mm_at2048_acc
        tl.store(mul_out + i * 2048 + j, mul)
