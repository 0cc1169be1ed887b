// var_mean_sum[i1] = sum_r0,r2 arg0_1[r0,i1,r2]
// var_mean_mean[i0] = (var_mean_sum[i0] / 784.0)
// var_mean_squares[i1] = sum_r0,r2 ((arg0_1[r0,i1,r2] - var_mean_mean[i1]) * (arg0_1[r0,i1,r2] - var_mean_mean[i1]))
// var_mean_shift[i1] = sum_r0,r2 (arg0_1[r0,i1,r2] - var_mean_mean[i1])
// var_mean_moved[i0] = (var_mean_shift[i0] / 784.0)
// var_mean_less[i0] = (var_mean_shift[i0] * var_mean_moved[i0])
// var_mean_exact[i0] = where((var_mean_less[i0] > (var_mean_squares[i0] * 2.2737367544323206e-13)), (var_mean_mean[i0] + var_mean_moved[i0]), var_mean_mean[i0]
// var_mean_around[i0] = maximum((var_mean_squares[i0] - var_mean_less[i0]), 0.0)
// var_mean_variance[i0] = (var_mean_around[i0] / 784.0)
// mul[i0] = (arg1_1[i0] * 0.9)
// mul_1[i0] = (var_mean_exact[i0] * 0.1)
// add[i0] = (mul[i0] + mul_1[i0])
// mul_2[i0] = (arg2_1[i0] * 0.9)
// mul_3[i0] = (var_mean_variance[i0] * 0.1)
// add_1[i0] = (mul_2[i0] + mul_3[i0])
// sub[i0,i1,i2] = (arg0_1[i0,i1,i2] - var_mean_exact[i1])
// add_2[i0] = (var_mean_variance[i0] + 1e-05)
// rsqrt[i0] = rsqrt(add_2[i0])
// mul_4[i0,i1,i2] = (sub[i0,i1,i2] * rsqrt[i1])
// arg1_1_new[i0] = add[i0]
// arg2_1_new[i0] = add_1[i0]
// rows: i<256 x j<16 k<49, SIMD over k, 3 passes
static void var_mean_rsqrt_copy_0(const float* __restrict arg0_1, float* __restrict mul_4_out, float* __restrict arg1_1, float* __restrict arg2_1, int64_t* bad, int threads) {
  #pragma omp parallel for schedule(static) num_threads(threads_for(200704, 5041, threads))
  for (int64_t i = 0; i < 256; ++i) {
    double var_mean_sum_total = 0;
    for (int64_t j = 0; j < 16; ++j) {  // pass 1
      float var_mean_sum_some = 0;
      #pragma omp simd reduction(+:var_mean_sum_some)
      for (int64_t k = 0; k < 49; ++k) {  // pass 1
        var_mean_sum_some += arg0_1[i * 49 + j * 12544 + k];
      }
      var_mean_sum_total += var_mean_sum_some;
    }
    const float var_mean_sum = var_mean_sum_total;
    const float var_mean_mean = var_mean_sum / 784.0f;
    double var_mean_shift_total = 0;
    double var_mean_squares_total = 0;
    for (int64_t j = 0; j < 16; ++j) {  // pass 2
      float var_mean_shift_some = 0;
      float var_mean_squares_some = 0;
      #pragma omp simd reduction(+:var_mean_shift_some) reduction(+:var_mean_squares_some)
      for (int64_t k = 0; k < 49; ++k) {  // pass 2
        var_mean_shift_some += (arg0_1[i * 49 + j * 12544 + k] - var_mean_mean);
        var_mean_squares_some += ((arg0_1[i * 49 + j * 12544 + k] - var_mean_mean) * (arg0_1[i * 49 + j * 12544 + k] - var_mean_mean));
      }
      var_mean_shift_total += var_mean_shift_some;
      var_mean_squares_total += var_mean_squares_some;
    }
    const float var_mean_shift = var_mean_shift_total;
    const float var_mean_squares = var_mean_squares_total;
    const float var_mean_moved = var_mean_shift / 784.0f;
    const float var_mean_less = var_mean_shift * var_mean_moved;
    const float var_mean_exact = (var_mean_less > (var_mean_squares * 2.2737368e-13f)) ? (var_mean_mean + var_mean_moved) : var_mean_mean;
    const float var_mean_around = nan_max((var_mean_squares - var_mean_less), 0.0f);
    const float var_mean_variance = var_mean_around / 784.0f;
    const float add_2 = var_mean_variance + 1e-05f;
    const float rsqrt_ = rsqrt(add_2);
    const float mul = arg1_1[i] * 0.9f;
    const float mul_1 = var_mean_exact * 0.1f;
    const float add = mul + mul_1;
    const float mul_2 = arg2_1[i] * 0.9f;
    const float mul_3 = var_mean_variance * 0.1f;
    const float add_1 = mul_2 + mul_3;
    arg1_1[i] = add;
    arg2_1[i] = add_1;
    for (int64_t j = 0; j < 16; ++j) {  // pass 3
      #pragma omp simd
      for (int64_t k = 0; k < 49; ++k) {  // pass 3
        const float sub = arg0_1[i * 49 + j * 12544 + k] - var_mean_exact;
        const float mul_4 = sub * rsqrt_;
        mul_4_out[i * 49 + j * 12544 + k] = mul_4;
      }
    }
  }
}
