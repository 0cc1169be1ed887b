// pow_1[i0,i1] = (arg1_1[i0,i1] * arg1_1[i0,i1])
// mean_sum[i0] = sum_r1 pow_1[i0,r1]
// mean[i0] = (mean_sum[i0] / 512.0)
// add[i0] = (mean[i0] + 1e-06)
// rsqrt[i0] = rsqrt(add[i0])
// mul[i0,i1] = (arg1_1[i0,i1] * rsqrt[i0])
// mul_1[i0,i1] = (arg0_1[i0,i1] * arg2_1[i1])
// mul_2[i0,i1] = (mul_1[i0,i1] * mul[i0,i1])
// mean_1_sum[i0] = sum_r1 mul_2[i0,r1]
// mean_1[i0] = (mean_1_sum[i0] / 512.0)
// mul_3[i0,i1] = (mul[i0,i1] * mean_1[i0])
// sub[i0,i1] = (mul_1[i0,i1] - mul_3[i0,i1])
// mul_4[i0,i1] = (rsqrt[i0] * sub[i0,i1])
// mul_5[i0,i1] = (arg0_1[i0,i1] * mul[i0,i1])
// sum_1[i1] = sum_r0 mul_5[r0,i1]
// rows: i<4096 x j<512, SIMD over j, 3 passes
static void pow_mean_rsqrt_0(const float* __restrict arg1_1, const float* __restrict arg2_1, const float* __restrict arg0_1, float* __restrict mul_4_out, float* __restrict sum_1_out, int64_t* error, int max_threads) {
  const int num_threads = max_threads;
  double* sum_1_partials = (double*)malloc(sizeof(double) * num_threads * (512));
  for (int64_t c = 0; c < num_threads * (512); ++c) sum_1_partials[c] = 0;
  float* sum_1_accs = (float*)malloc(sizeof(float) * num_threads * (512));
  #pragma omp parallel num_threads(num_threads)
  {
    const int tid = omp_get_thread_num();
    float* __restrict sum_1_acc = sum_1_accs + tid * (512);
    double* __restrict sum_1_partial = sum_1_partials + tid * (512);
    for (int64_t c = 0; c < 512; ++c) sum_1_acc[c] = 0;
    int64_t rows_done = 0;
    #pragma omp for schedule(static)
    for (int64_t i = 0; i < 4096; ++i) {
      float mean_sum = 0;
      #pragma omp simd reduction(+:mean_sum)
      for (int64_t j = 0; j < 512; ++j) {  // pass 1
        const float pow_1 = arg1_1[i * 512 + j] * arg1_1[i * 512 + j];
        mean_sum += pow_1;
      }
      const float mean = mean_sum / 512.0f;
      const float add = mean + 1e-06f;
      const float rsqrt_ = rsqrt(add);
      float mean_1_sum = 0;
      #pragma omp simd reduction(+:mean_1_sum)
      for (int64_t j = 0; j < 512; ++j) {  // pass 2
        const float mul_1 = arg0_1[i * 512 + j] * arg2_1[j];
        const float mul = arg1_1[i * 512 + j] * rsqrt_;
        const float mul_2 = mul_1 * mul;
        const float mul_5 = arg0_1[i * 512 + j] * mul;
        mean_1_sum += mul_2;
        sum_1_acc[j] += mul_5;
      }
      const float mean_1 = mean_1_sum / 512.0f;
      prefetch(arg1_1 + i * 512 + 512, 512);  // next row
      prefetch(arg0_1 + i * 512 + 512, 512);  // next row
      #pragma omp simd
      for (int64_t j = 0; j < 512; ++j) {  // pass 3
        const float mul_1 = arg0_1[i * 512 + j] * arg2_1[j];
        const float mul = arg1_1[i * 512 + j] * rsqrt_;
        const float mul_3 = mul * mean_1;
        const float sub = mul_1 - mul_3;
        const float mul_4 = rsqrt_ * sub;
        mul_4_out[i * 512 + j] = mul_4;
      }
      if (++rows_done % 64 == 0) {
        #pragma omp simd
        for (int64_t c = 0; c < 512; ++c) {
          sum_1_partial[c] += sum_1_acc[c];
          sum_1_acc[c] = 0;
        }
      }
    }
    #pragma omp simd
    for (int64_t c = 0; c < 512; ++c) {
      sum_1_partial[c] += sum_1_acc[c];
      sum_1_acc[c] = 0;
    }
  }
  for (int64_t j = 0; j < 512; ++j) {  // combine the partials of all threads
    double sum_1_total = sum_1_partials[j];
    for (int t = 1; t < num_threads; ++t) sum_1_total += sum_1_partials[t * (512) + j];
    const float sum_1 = sum_1_total;
    sum_1_out[j] = sum_1;
  }
  free(sum_1_partials);
  free(sum_1_accs);
}
