// var_mean_sum[i0] = sum_r1 arg0_1[i0,r1]
// var_mean_mean[i0] = (var_mean_sum[i0] / 1024.0)
// var_mean_squares[i0] = sum_r1 ((arg0_1[i0,r1] - var_mean_mean[i0]) * (arg0_1[i0,r1] - var_mean_mean[i0]))
// var_mean_shift[i0] = sum_r1 (arg0_1[i0,r1] - var_mean_mean[i0])
// var_mean_moved[i0] = (var_mean_shift[i0] / 1024.0)
// var_mean_less[i0] = (var_mean_shift[i0] * var_mean_moved[i0])
// var_mean_exact[i0] = where((var_mean_less[i0] > (var_mean_squares[i0] * 2.2737367544323206e-13)), (var_mean_mean[i0] + var_mean_moved[i0]), var_mean_mean[i0]
// var_mean_around[i0] = maximum((var_mean_squares[i0] - var_mean_less[i0]), 0.0)
// var_mean_variance[i0] = (var_mean_around[i0] / 1024.0)
// add[i0] = (var_mean_variance[i0] + 1e-05)
// rsqrt[i0] = rsqrt(add[i0])
// sub[i0,i1] = (arg0_1[i0,i1] - var_mean_exact[i0])
// mul[i0,i1] = (sub[i0,i1] * rsqrt[i0])
// mul_1[i0,i1] = (mul[i0,i1] * arg1_1[i1])
// add_1[i0,i1] = (mul_1[i0,i1] + arg1_1[i1])
// rows: i<4096 x j<1024, SIMD over j, 3 passes
static void var_mean_rsqrt_0(const float* __restrict arg0_1, const float* __restrict arg1_1, float* __restrict add_1_out, int64_t* bad, int threads) {
  #pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < 4096; ++i) {
    float var_mean_sum = 0;
    #pragma omp simd reduction(+:var_mean_sum)
    for (int64_t j = 0; j < 1024; ++j) {  // pass 1
      var_mean_sum += arg0_1[i * 1024 + j];
    }
    const float var_mean_mean = var_mean_sum / 1024.0f;
    float var_mean_shift = 0;
    float var_mean_squares = 0;
    #pragma omp simd reduction(+:var_mean_shift) reduction(+:var_mean_squares)
    for (int64_t j = 0; j < 1024; ++j) {  // pass 2
      var_mean_shift += (arg0_1[i * 1024 + j] - var_mean_mean);
      var_mean_squares += ((arg0_1[i * 1024 + j] - var_mean_mean) * (arg0_1[i * 1024 + j] - var_mean_mean));
    }
    const float var_mean_moved = var_mean_shift / 1024.0f;
    const float var_mean_less = var_mean_shift * var_mean_moved;
    const float var_mean_exact = (var_mean_less > (var_mean_squares * 2.2737368e-13f)) ? (var_mean_mean + var_mean_moved) : var_mean_mean;
    const float var_mean_around = nan_max((var_mean_squares - var_mean_less), 0.0f);
    const float var_mean_variance = var_mean_around / 1024.0f;
    const float add = var_mean_variance + 1e-05f;
    const float rsqrt_ = rsqrt(add);
    for (int64_t block = 0; block < 1024; block += 512) {
      fetch(arg0_1 + i * 1024 + block + 1024, 512);  // of the next row
      #pragma omp simd
      for (int64_t j = block; j < block + 512; ++j) {  // pass 3
        const float sub = arg0_1[i * 1024 + j] - var_mean_exact;
        const float mul = sub * rsqrt_;
        const float mul_1 = mul * arg1_1[j];
        const float add_1 = mul_1 + arg1_1[j];
        add_1_out[i * 1024 + j] = add_1;
      }
    }
  }
}
