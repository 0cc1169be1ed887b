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
    float amax = lowest<float>();
    #pragma omp simd reduction(nan_max:amax)
    for (int64_t j = 0; j < 1024; ++j) {  // pass 1
      amax = nan_max(amax, arg0_1[i * 1024 + j]);
    }
    float sum_1 = 0;
    for (int64_t block = 0; block < 1024; block += 512) {
      prefetch(arg0_1 + i * 1024 + block + 1024, 512);  // next row
      #pragma omp simd reduction(+:sum_1)
      for (int64_t j = block; j < block + 512; ++j) {  // pass 2
        const float sub = arg0_1[i * 1024 + j] - amax;
        const float exp_ = exp(sub);
        exp__row[j] = exp_;
        sum_1 += exp_;
      }
    }
    const Reciprocal sum_1_reciprocal = make_reciprocal(sum_1);
    #pragma omp simd
    for (int64_t j = 0; j < 1024; ++j) {  // pass 3
      const float exp_ = exp__row[j];
      const float div = exp_ / sum_1_reciprocal;
      div_out[i * 1024 + j] = div;
    }
  }
}
