// var_mean_sum[i0] = sum_r1 arg0_1[i0,r1]
// var_mean_mean[i0] = (var_mean_sum[i0] / 1024.0)
// var_mean_squares[i0] = sum_r1 ((arg0_1[i0,r1] - var_mean_mean[i0]) * (arg0_1[i0,r1] - var_mean_mean[i0]))
// var_mean_deviations[i0] = sum_r1 (arg0_1[i0,r1] - var_mean_mean[i0])
// var_mean_mean_error[i0] = (var_mean_deviations[i0] / 1024.0)
// var_mean_square_error[i0] = (var_mean_deviations[i0] * var_mean_mean_error[i0])
// var_mean_exact_mean[i0] = where((var_mean_square_error[i0] > (var_mean_squares[i0] * 2.2737367544323206e-13)), (var_mean_mean[i0] + var_mean_mean_error[i0]),
// var_mean_exact_squares[i0] = maximum((var_mean_squares[i0] - var_mean_square_error[i0]), 0.0)
// var_mean_variance[i0] = (var_mean_exact_squares[i0] / 1024.0)
// add[i0] = (var_mean_variance[i0] + 1e-05)
// rsqrt[i0] = rsqrt(add[i0])
// sub[i0,i1] = (arg0_1[i0,i1] - var_mean_exact_mean[i0])
// mul[i0,i1] = (sub[i0,i1] * rsqrt[i0])
// mul_1[i0,i1] = (mul[i0,i1] * arg1_1[i1])
// add_1[i0,i1] = (mul_1[i0,i1] + arg1_1[i1])
// rows: i<4096 x j<1024, SIMD over j, 3 passes
static void var_mean_rsqrt_0(const float* __restrict arg0_1, const float* __restrict arg1_1, float* __restrict add_1_out, int64_t* error, int max_threads) {
  #pragma omp parallel for schedule(static) num_threads(max_threads)
  for (int64_t i = 0; i < 4096; ++i) {
    double var_mean_sum_total = 0;
    var_mean_sum_total = combine_blocks<Sum>(var_mean_sum_total, arg0_1 + i * 1024 + 0, 1024);
    const float var_mean_sum = var_mean_sum_total;
    const float var_mean_mean = var_mean_sum / 1024.0f;
    double var_mean_deviations_total = 0;
    double var_mean_squares_total = 0;
    alignas(64) float var_mean_deviations_values[1024];
    alignas(64) float var_mean_squares_values[1024];
    #pragma omp simd
    for (int64_t j = 0; j < 1024; ++j) {  // pass 2
      var_mean_deviations_values[j] = (arg0_1[i * 1024 + j] - var_mean_mean);
      var_mean_squares_values[j] = ((arg0_1[i * 1024 + j] - var_mean_mean) * (arg0_1[i * 1024 + j] - var_mean_mean));
    }
    var_mean_deviations_total = combine_blocks<Sum>(var_mean_deviations_total, var_mean_deviations_values, 1024);
    var_mean_squares_total = combine_blocks<Sum>(var_mean_squares_total, var_mean_squares_values, 1024);
    const float var_mean_deviations = var_mean_deviations_total;
    const float var_mean_squares = var_mean_squares_total;
    const float var_mean_mean_error = var_mean_deviations / 1024.0f;
    const float var_mean_square_error = var_mean_deviations * var_mean_mean_error;
    const float var_mean_exact_mean = (var_mean_square_error > (var_mean_squares * 2.2737368e-13f)) ? (var_mean_mean + var_mean_mean_error) : var_mean_mean;
    const float var_mean_exact_squares = nan_max((var_mean_squares - var_mean_square_error), 0.0f);
    const float var_mean_variance = var_mean_exact_squares / 1024.0f;
    const float add = var_mean_variance + 1e-05f;
    const float rsqrt_ = rsqrt(add);
    for (int64_t block = 0; block < 1024; block += 512) {
      prefetch(arg0_1 + i * 1024 + block + 1024, 512);  // next row
      #pragma omp simd
      for (int64_t j = block; j < block + 512; ++j) {  // pass 3
        const float sub = arg0_1[i * 1024 + j] - var_mean_exact_mean;
        const float mul = sub * rsqrt_;
        const float mul_1 = mul * arg1_1[j];
        const float add_1 = mul_1 + arg1_1[j];
        add_1_out[i * 1024 + j] = add_1;
      }
    }
  }
}
