// amax[i0] = max_r1 arg0_1[i0,r1]
// sub[i0,i1] = (arg0_1[i0,i1] - amax[i0])
// exp[i0,i1] = exp(sub[i0,i1])
// sum_1[i0] = sum_r1 exp[i0,r1]
// div[i0,i1] = (exp[i0,i1] / sum_1[i0])
// rows: i<4096 x j<1024, SIMD over j, 3 passes, buffers exp
static void amax_exp_sum_0(const float* __restrict arg0_1, float* __restrict div_out, int64_t* error, int max_threads) {
  #pragma omp parallel for schedule(static) num_threads(max_threads)
  for (int64_t i = 0; i < 4096; ++i) {
    alignas(64) float exp__row[1024];  // for later passes
    float amax_total = lowest<float>();
    amax_total = combine_blocks<Maximum>(amax_total, arg0_1 + i * 1024 + 0, 1024);
    const float amax = amax_total;
    double sum_1_total = 0;
    prefetch(arg0_1 + i * 1024 + 1024, 1024);  // next row
    #pragma omp simd
    for (int64_t j = 0; j < 1024; ++j) {  // pass 2
      const float sub = arg0_1[i * 1024 + j] - amax;
      const float exp_ = exp(sub);
      exp__row[j] = exp_;
    }
    sum_1_total = combine_blocks<Sum>(sum_1_total, exp__row + 0, 1024);
    const float sum_1 = sum_1_total;
    #pragma omp simd
    for (int64_t j = 0; j < 1024; ++j) {  // pass 3
      const float exp_ = exp__row[j];
      const float div = exp_ / sum_1;
      div_out[i * 1024 + j] = div;
    }
  }
}
