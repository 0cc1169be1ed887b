import triton
import triton.language as tl


# var_mean_sum[i1] = sum_r0 arg0_1[r0,i1]
# var_mean_mean[i0] = (var_mean_sum[i0] / 100352.0)
# var_mean_squares[i1] = sum_r0 ((arg0_1[r0,i1] - var_mean_mean[i1]) * (arg0_1[r0,i1] - var_mean_mean[i1]))
# var_mean_variance[i0] = (var_mean_squares[i0] / 100352.0)
# columns: i<64 x j<100352, blocks of 128 j x 32 i, 8 warps, 1 pass over j, Welford, 256 splits, 3 stages
@triton.jit
def var_mean_0(arg0_1, var_mean_sum_partials, var_mean_squares_partials, var_mean_squares_base_partials, var_mean_squares_center_partials, var_mean_squares_count_partials):
    i = (tl.program_id(0) * 32 + tl.arange(0, 32))[None, :]
    var_mean_sum_acc = tl.full([128, 32], 0.0, tl.float32)
    var_mean_squares_blocks = tl.full([], 0.0, tl.float32)
    var_mean_squares_first = tl.full([128, 32], 0.0, tl.float32)
    var_mean_squares_mean = tl.full([128, 32], 0.0, tl.float32)
    var_mean_squares_m2 = tl.full([128, 32], 0.0, tl.float32)
    split = tl.program_id(1)
    for j0 in tl.range(split * 512, tl.minimum(split * 512 + 512, 100352), 128, num_stages=3):
        j = (j0 + tl.arange(0, 128))[:, None]
        arg0_1_ij = tl.load(arg0_1 + i + j * 64)
        var_mean_sum_acc += arg0_1_ij
        var_mean_squares_blocks += 1.0
        weight = 1.0 / var_mean_squares_blocks
        var_mean_squares_first = tl.where(var_mean_squares_blocks == 1.0, arg0_1_ij, var_mean_squares_first)
        delta = arg0_1_ij - var_mean_squares_first - var_mean_squares_mean
        var_mean_squares_mean += delta * weight
        var_mean_squares_m2 += delta * delta * (1.0 - weight)
    var_mean_sum = tl.sum(var_mean_sum_acc, 0, keep_dims=True)
    length = tl.minimum(split * 512 + 512, 100352) - split * 512
    lane_count = (tl.maximum(length - tl.arange(0, 128)[:, None] + 127, 0) // 128).to(tl.float32)
    var_mean_squares_count = tl.sum(lane_count, 0, keep_dims=True)
    var_mean_squares_base = tl.max(tl.where(lane_count > 0, var_mean_squares_first, float("-inf")), 0, keep_dims=True)
    delta_2 = tl.where(lane_count > 0, var_mean_squares_first - var_mean_squares_base + var_mean_squares_mean, 0.0)
    var_mean_squares_center = tl.sum(lane_count * delta_2, 0, keep_dims=True) / tl.maximum(var_mean_squares_count, 1.0)
    delta_2 -= var_mean_squares_center
    var_mean_squares = tl.sum(var_mean_squares_m2 + lane_count * delta_2 * delta_2, 0, keep_dims=True)
    var_mean_squares_base = tl.where(var_mean_squares_count > 0, var_mean_squares_base, 0.0)
    tl.store(var_mean_sum_partials + split * 64 + i, var_mean_sum)
    tl.store(var_mean_squares_partials + split * 64 + i, var_mean_squares)
    tl.store(var_mean_squares_base_partials + split * 64 + i, var_mean_squares_base)
    tl.store(var_mean_squares_center_partials + split * 64 + i, var_mean_squares_center)
    tl.store(var_mean_squares_count_partials + split * 64 + i, var_mean_squares_count)


# combine: i<64 x t<256, blocks of 256 t x 16 i, 8 warps
@triton.jit
def var_mean_0_combine(var_mean_sum_partials, var_mean_squares_center_partials, var_mean_squares_base_partials, var_mean_squares_count_partials, var_mean_squares_partials, var_mean_mean_out, var_mean_variance_out):
    i = (tl.program_id(0) * 16 + tl.arange(0, 16))[None, :]
    t = tl.arange(0, 256)[:, None]
    var_mean_sum_partials_it = tl.load(var_mean_sum_partials + i + t * 64)
    var_mean_squares_base_partials_it = tl.load(var_mean_squares_base_partials + i + t * 64)
    var_mean_squares_base_partials_i = tl.load(var_mean_squares_base_partials + i)
    var_mean_squares_center_partials_it = tl.load(var_mean_squares_center_partials + i + t * 64)
    var_mean_squares_center_partials_i = tl.load(var_mean_squares_center_partials + i)
    var_mean_squares_partials_it = tl.load(var_mean_squares_partials + i + t * 64)
    var_mean_squares_count_partials_it = tl.load(var_mean_squares_count_partials + i + t * 64)
    var_mean_sum = tl.sum(var_mean_sum_partials_it, 0, keep_dims=True)
    var_mean_mean = tl.div_rn(var_mean_sum, 100352.0)
    var_mean_squares_delta = (var_mean_squares_base_partials_it - var_mean_squares_base_partials_i) + (var_mean_squares_center_partials_it - var_mean_squares_center_partials_i)
    var_mean_squares_m2 = tl.sum(var_mean_squares_partials_it + ((var_mean_squares_count_partials_it * var_mean_squares_delta) * var_mean_squares_delta), 0, keep_dims=True)
    var_mean_squares_delta_sum = tl.sum(var_mean_squares_count_partials_it * var_mean_squares_delta, 0, keep_dims=True)
    var_mean_squares = var_mean_squares_m2 - tl.div_rn(var_mean_squares_delta_sum * var_mean_squares_delta_sum, 100352.0)
    var_mean_variance = tl.div_rn(var_mean_squares, 100352.0)
    tl.store(var_mean_mean_out + i, var_mean_mean)
    tl.store(var_mean_variance_out + i, var_mean_variance)
