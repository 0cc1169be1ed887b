// amax[i1] = max_r0 arg0_1[r0,i1]
// sub[i0,i1] = (arg0_1[i0,i1] - amax[i1])
// exp[i0,i1] = exp(sub[i0,i1])
// sum_1[i1] = sum_r0 exp[r0,i1]
// div[i0,i1] = (exp[i0,i1] / sum_1[i1])
// columns: i<1024 x j<512, SIMD over i, 3 passes, blocks of 256, buffers exp
static void amax_exp_sum_0(const float* __restrict arg0_1, float* __restrict div_out, int64_t* error, int max_threads) {
  #pragma omp parallel for schedule(static) num_threads(choose_num_threads(524288, 9709, max_threads))
  for (int64_t lane0 = 0; lane0 < 1024; lane0 += 256) {  // block of lanes
    const int64_t lanes = 256;
    alignas(64) float exp__buffer[512][256];
    alignas(64) float amax[256];
    #pragma omp simd
    for (int64_t lane = 0; lane < lanes; ++lane) {
      amax[lane] = lowest<float>();
    }
    for (int64_t j = 0; j < 512; ++j) {  // pass 1
      #pragma omp simd
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const int64_t i = lane0 + lane;
        amax[lane] = nan_max(amax[lane], arg0_1[i + j * 1024]);
      }
    }
    alignas(64) float sum_1[256];
    alignas(64) float sum_1_acc[256];
    alignas(64) double sum_1_total[256];
    #pragma omp simd
    for (int64_t lane = 0; lane < lanes; ++lane) {
      sum_1_total[lane] = 0;
    }
    for (int64_t block = 0; block < 512; block += 128) {
      #pragma omp simd
      for (int64_t lane = 0; lane < lanes; ++lane) {
        sum_1_acc[lane] = 0;
      }
      for (int64_t j = block; j < min_i64(512, block + 128); ++j) {  // pass 2
        #pragma omp simd
        for (int64_t lane = 0; lane < lanes; ++lane) {
          const int64_t i = lane0 + lane;
          const float sub = arg0_1[i + j * 1024] - amax[lane];
          const float exp_ = exp(sub);
          exp__buffer[j][lane] = exp_;
          sum_1_acc[lane] += exp_;
        }
      }
      #pragma omp simd
      for (int64_t lane = 0; lane < lanes; ++lane) {  // float accumulators into double totals
        const int64_t i = lane0 + lane;
        sum_1_total[lane] += sum_1_acc[lane];
      }
    }
    #pragma omp simd
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int64_t i = lane0 + lane;
      sum_1[lane] = sum_1_total[lane];
    }
    for (int64_t j = 0; j < 512; ++j) {  // pass 3
      #pragma omp simd
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const int64_t i = lane0 + lane;
        const float exp_ = exp__buffer[j][lane];
        const float div = exp_ / sum_1[lane];
        div_out[i + j * 1024] = div;
      }
    }
  }
}
