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
  const int64_t rows = 4096;
  const int64_t chunk_rows = rows / 8 < 8 ? 8 : min_i64(rows / 8, 64);
  const int64_t chunks = (rows + chunk_rows - 1) / chunk_rows;
  float* sum_1_partials = (float*)malloc(sizeof(float) * (chunks * (512) + 1));
  #pragma omp parallel for schedule(static) num_threads(max_threads)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    float* __restrict sum_1_acc = sum_1_partials + chunk * (512);
    for (int64_t c = 0; c < 512; ++c) sum_1_acc[c] = 0;
    const int64_t rows_end = min_i64(rows, (chunk + 1) * chunk_rows);
    for (int64_t i = chunk * chunk_rows; i < rows_end; ++i) {
      double mean_sum_total = 0;
      alignas(64) float mean_sum_values[512];
      #pragma omp simd
      for (int64_t j = 0; j < 512; ++j) {  // pass 1
        const float pow_1 = arg1_1[i * 512 + j] * arg1_1[i * 512 + j];
        mean_sum_values[j] = pow_1;
      }
      mean_sum_total = combine_blocks<Sum>(mean_sum_total, mean_sum_values, 512);
      const float mean_sum = mean_sum_total;
      const float mean = mean_sum / 512.0f;
      const float add = mean + 1e-06f;
      const float rsqrt_ = rsqrt(add);
      double mean_1_sum_total = 0;
      alignas(64) float mean_1_sum_values[512];
      #pragma omp simd
      for (int64_t j = 0; j < 512; ++j) {  // pass 2
        const float mul_1 = arg0_1[i * 512 + j] * arg2_1[j];
        const float mul = arg1_1[i * 512 + j] * rsqrt_;
        const float mul_2 = mul_1 * mul;
        const float mul_5 = arg0_1[i * 512 + j] * mul;
        mean_1_sum_values[j] = mul_2;
        sum_1_acc[j] += mul_5;
      }
      mean_1_sum_total = combine_blocks<Sum>(mean_1_sum_total, mean_1_sum_values, 512);
      const float mean_1_sum = mean_1_sum_total;
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
    }
  }
  double* __restrict sum_1_totals = (double*)malloc(sizeof(double) * (512 + 1));
  for (int64_t c = 0; c < 512; ++c) sum_1_totals[c] = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    #pragma omp simd
    for (int64_t c = 0; c < 512; ++c) {
      sum_1_totals[c] += sum_1_partials[chunk * (512) + c];
    }
  }
  for (int64_t j = 0; j < 512; ++j) {
    const float sum_1 = sum_1_totals[j];
    sum_1_out[j] = sum_1;
  }
  free(sum_1_totals);
  free(sum_1_partials);
}
