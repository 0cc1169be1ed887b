// pow_1[i0,i1] = (arg0_1[i0,i1] * arg0_1[i0,i1])
// mean_sum[i0] = sum_r1 pow_1[i0,r1]
// mean[i0] = (mean_sum[i0] / 1024.0)
// add[i0] = (mean[i0] + 9.999999974752427e-07)
// rsqrt[i0] = rsqrt(add[i0])
// mul[i0,i1] = (arg0_1[i0,i1] * rsqrt[i0])
// mul_1[i0,i1] = (mul[i0,i1] * arg1_1[i1])
// rows: i<4096 x j<1024, SIMD over j, 2 passes
static void pow_mean_rsqrt_0(const float* __restrict arg0_1, const float* __restrict arg1_1, float* __restrict mul_1_out, int64_t* error, int max_threads) {
  #pragma omp parallel for schedule(static) num_threads(max_threads)
  for (int64_t i = 0; i < 4096; ++i) {
    double mean_sum_total = 0;
    alignas(64) float mean_sum_values[1024];
    #pragma omp simd
    for (int64_t j = 0; j < 1024; ++j) {  // pass 1
      const float pow_1 = arg0_1[i * 1024 + j] * arg0_1[i * 1024 + j];
      mean_sum_values[j] = pow_1;
    }
    mean_sum_total = combine_blocks<Sum>(mean_sum_total, mean_sum_values, 1024);
    const float mean_sum = mean_sum_total;
    const float mean = mean_sum / 1024.0f;
    const float add = mean + 1e-06f;
    const float rsqrt_ = rsqrt(add);
    for (int64_t block = 0; block < 1024; block += 512) {
      prefetch(arg0_1 + i * 1024 + block + 1024, 512);  // next row
      #pragma omp simd
      for (int64_t j = block; j < block + 512; ++j) {  // pass 2
        const float mul = arg0_1[i * 1024 + j] * rsqrt_;
        const float mul_1 = mul * arg1_1[j];
        mul_1_out[i * 1024 + j] = mul_1;
      }
    }
  }
}
