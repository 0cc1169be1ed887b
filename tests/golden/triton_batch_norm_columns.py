import triton
import triton.language as tl


# var_mean_sum[i1] = sum_r0 arg0_1[r0,i1]
# var_mean_mean[i0] = (var_mean_sum[i0] / 100352.0)
# var_mean_squares[i1] = sum_r0 ((arg0_1[r0,i1] - var_mean_mean[i1]) * (arg0_1[r0,i1] - var_mean_mean[i1]))
# var_mean_variance[i0] = (var_mean_squares[i0] / 100352.0)
# columns: i<64 x j<100352, blocks of 128 j x 32 i, 8 warps, 1 walk over j, sum and squares together, 256 parts, 3 blocks ahead
@triton.jit
def var_mean_0(arg0_1, var_mean_sum_parts, var_mean_squares_parts, var_mean_squares_base_parts, var_mean_squares_center_parts, var_mean_squares_count_parts):
    i = (tl.program_id(0) * 32 + tl.arange(0, 32))[None, :]
    var_mean_sum_sums = tl.full([128, 32], 0.0, tl.float32)
    var_mean_squares_seen = tl.full([], 0.0, tl.float32)
    var_mean_squares_first = tl.full([128, 32], 0.0, tl.float32)
    var_mean_squares_mean = tl.full([128, 32], 0.0, tl.float32)
    var_mean_squares_sums = tl.full([128, 32], 0.0, tl.float32)
    part = tl.program_id(1)
    for j0 in tl.range(part * 512, tl.minimum(part * 512 + 512, 100352), 128, num_stages=3):
        j = (j0 + tl.arange(0, 128))[:, None]
        arg0_1_ij = tl.load(arg0_1 + i + j * 64)
        var_mean_sum_sums += arg0_1_ij
        var_mean_squares_seen += 1.0
        portion = 1.0 / var_mean_squares_seen
        var_mean_squares_first = tl.where(var_mean_squares_seen == 1.0, arg0_1_ij, var_mean_squares_first)
        away = arg0_1_ij - var_mean_squares_first - var_mean_squares_mean
        var_mean_squares_mean += away * portion
        var_mean_squares_sums += away * away * (1.0 - portion)
    var_mean_sum = tl.sum(var_mean_sum_sums, 0, keep_dims=True)
    length = tl.minimum(part * 512 + 512, 100352) - part * 512
    each = (tl.maximum(length - tl.arange(0, 128)[:, None] + 127, 0) // 128).to(tl.float32)
    var_mean_squares_count = tl.sum(each, 0, keep_dims=True)
    var_mean_squares_base = tl.max(tl.where(each > 0, var_mean_squares_first, float("-inf")), 0, keep_dims=True)
    away_2 = tl.where(each > 0, var_mean_squares_first - var_mean_squares_base + var_mean_squares_mean, 0.0)
    var_mean_squares_center = tl.sum(each * away_2, 0, keep_dims=True) / tl.maximum(var_mean_squares_count, 1.0)
    away_2 -= var_mean_squares_center
    var_mean_squares = tl.sum(var_mean_squares_sums + each * away_2 * away_2, 0, keep_dims=True)
    var_mean_squares_base = tl.where(var_mean_squares_count > 0, var_mean_squares_base, 0.0)
    tl.store(var_mean_sum_parts + part * 64 + i, var_mean_sum)
    tl.store(var_mean_squares_parts + part * 64 + i, var_mean_squares)
    tl.store(var_mean_squares_base_parts + part * 64 + i, var_mean_squares_base)
    tl.store(var_mean_squares_center_parts + part * 64 + i, var_mean_squares_center)
    tl.store(var_mean_squares_count_parts + part * 64 + i, var_mean_squares_count)


# finish: i<64 x t<256, blocks of 256 t x 16 i, 8 warps
@triton.jit
def var_mean_0_finish(var_mean_sum_parts, var_mean_squares_center_parts, var_mean_squares_base_parts, var_mean_squares_count_parts, var_mean_squares_parts, var_mean_mean_out, var_mean_variance_out):
    i = (tl.program_id(0) * 16 + tl.arange(0, 16))[None, :]
    t = tl.arange(0, 256)[:, None]
    var_mean_sum_parts_it = tl.load(var_mean_sum_parts + i + t * 64)
    var_mean_squares_base_parts_it = tl.load(var_mean_squares_base_parts + i + t * 64)
    var_mean_squares_base_parts_i = tl.load(var_mean_squares_base_parts + i)
    var_mean_squares_center_parts_it = tl.load(var_mean_squares_center_parts + i + t * 64)
    var_mean_squares_center_parts_i = tl.load(var_mean_squares_center_parts + i)
    var_mean_squares_parts_it = tl.load(var_mean_squares_parts + i + t * 64)
    var_mean_squares_count_parts_it = tl.load(var_mean_squares_count_parts + i + t * 64)
    var_mean_sum = tl.sum(var_mean_sum_parts_it, 0, keep_dims=True)
    var_mean_mean = tl.div_rn(var_mean_sum, 100352.0)
    var_mean_squares_away = (var_mean_squares_base_parts_it - var_mean_squares_base_parts_i) + (var_mean_squares_center_parts_it - var_mean_squares_center_parts_i)
    var_mean_squares_around = tl.sum(var_mean_squares_parts_it + ((var_mean_squares_count_parts_it * var_mean_squares_away) * var_mean_squares_away), 0, keep_dims=True)
    var_mean_squares_shift = tl.sum(var_mean_squares_count_parts_it * var_mean_squares_away, 0, keep_dims=True)
    var_mean_squares = var_mean_squares_around - tl.div_rn(var_mean_squares_shift * var_mean_squares_shift, 100352.0)
    var_mean_variance = tl.div_rn(var_mean_squares, 100352.0)
    tl.store(var_mean_mean_out + i, var_mean_mean)
    tl.store(var_mean_variance_out + i, var_mean_variance)
