// var_mean_sum[i1] = sum_r0,r2 arg0_1[r0,i1,r2]
// var_mean_mean[i0] = (var_mean_sum[i0] / 784.0)
// var_mean_squares[i1] = sum_r0,r2 ((arg0_1[r0,i1,r2] - var_mean_mean[i1]) * (arg0_1[r0,i1,r2] - var_mean_mean[i1]))
// var_mean_deviations[i1] = sum_r0,r2 (arg0_1[r0,i1,r2] - var_mean_mean[i1])
// var_mean_mean_error[i0] = (var_mean_deviations[i0] / 784.0)
// var_mean_square_error[i0] = (var_mean_deviations[i0] * var_mean_mean_error[i0])
// var_mean_exact_mean[i0] = where((var_mean_square_error[i0] > (var_mean_squares[i0] * 2.2737367544323206e-13)), (var_mean_mean[i0] + var_mean_mean_error[i0]),
// var_mean_exact_squares[i0] = maximum((var_mean_squares[i0] - var_mean_square_error[i0]), 0.0)
// var_mean_variance[i0] = (var_mean_exact_squares[i0] / 784.0)
// mul[i0] = (arg1_1[i0] * 0.9)
// mul_1[i0] = (var_mean_exact_mean[i0] * 0.1)
// add[i0] = (mul[i0] + mul_1[i0])
// mul_2[i0] = (arg2_1[i0] * 0.9)
// mul_3[i0] = (var_mean_variance[i0] * 0.1)
// add_1[i0] = (mul_2[i0] + mul_3[i0])
// sub[i0,i1,i2] = (arg0_1[i0,i1,i2] - var_mean_exact_mean[i1])
// add_2[i0] = (var_mean_variance[i0] + 1e-05)
// rsqrt[i0] = rsqrt(add_2[i0])
// mul_4[i0,i1,i2] = (sub[i0,i1,i2] * rsqrt[i1])
// arg1_1_new[i0] = add[i0]
// arg2_1_new[i0] = add_1[i0]
// rows: i<256 x j<16 k<49, SIMD over k, 3 passes
static void var_mean_rsqrt_copy_0(const float* __restrict arg0_1, float* __restrict mul_4_out, float* __restrict arg1_1, float* __restrict arg2_1, int64_t* error, int max_threads) {
  #pragma omp parallel for schedule(static) num_threads(choose_num_threads(200704, 5041, max_threads))
  for (int64_t i = 0; i < 256; ++i) {
    double var_mean_sum_total = 0;
    for (int64_t j = 0; j < 16; ++j) {  // pass 1
      var_mean_sum_total += reduce_block<Sum, 49, false>(arg0_1 + i * 49 + j * 12544 + 0, 49);
    }
    const float var_mean_sum = var_mean_sum_total;
    const float var_mean_mean = var_mean_sum / 784.0f;
    double var_mean_deviations_total = 0;
    double var_mean_squares_total = 0;
    for (int64_t j = 0; j < 16; ++j) {  // pass 2
      alignas(64) float var_mean_deviations_values[49];
      alignas(64) float var_mean_squares_values[49];
      #pragma omp simd
      for (int64_t k = 0; k < 49; ++k) {  // pass 2
        var_mean_deviations_values[k] = (arg0_1[i * 49 + j * 12544 + k] - var_mean_mean);
        var_mean_squares_values[k] = ((arg0_1[i * 49 + j * 12544 + k] - var_mean_mean) * (arg0_1[i * 49 + j * 12544 + k] - var_mean_mean));
      }
      var_mean_deviations_total += reduce_block<Sum, 49, true>(var_mean_deviations_values, 49);
      var_mean_squares_total += reduce_block<Sum, 49, true>(var_mean_squares_values, 49);
    }
    const float var_mean_deviations = var_mean_deviations_total;
    const float var_mean_squares = var_mean_squares_total;
    const float var_mean_mean_error = var_mean_deviations / 784.0f;
    const float var_mean_square_error = var_mean_deviations * var_mean_mean_error;
    const float var_mean_exact_mean = (var_mean_square_error > (var_mean_squares * 2.2737368e-13f)) ? (var_mean_mean + var_mean_mean_error) : var_mean_mean;
    const float var_mean_exact_squares = nan_max((var_mean_squares - var_mean_square_error), 0.0f);
    const float var_mean_variance = var_mean_exact_squares / 784.0f;
    const float add_2 = var_mean_variance + 1e-05f;
    const float rsqrt_ = rsqrt(add_2);
    const float mul = arg1_1[i] * 0.9f;
    const float mul_1 = var_mean_exact_mean * 0.1f;
    const float add = mul + mul_1;
    const float mul_2 = arg2_1[i] * 0.9f;
    const float mul_3 = var_mean_variance * 0.1f;
    const float add_1 = mul_2 + mul_3;
    arg1_1[i] = add;
    arg2_1[i] = add_1;
    for (int64_t j = 0; j < 16; ++j) {  // pass 3
      #pragma omp simd
      for (int64_t k = 0; k < 49; ++k) {  // pass 3
        const float sub = arg0_1[i * 49 + j * 12544 + k] - var_mean_exact_mean;
        const float mul_4 = sub * rsqrt_;
        mul_4_out[i * 49 + j * 12544 + k] = mul_4;
      }
    }
  }
}
