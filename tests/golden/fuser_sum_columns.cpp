// mul[i0,i1] = (arg0_1[i0,i1] * 2.0)
// sum_1[i1] = sum_r0 mul[r0,i1]
// columns: i<4096 x j<4096, SIMD over i, blocks of 512
static void sum_0(const float* __restrict arg0_1, float* __restrict sum_1_out, int64_t* bad, int threads) {
  #pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t first = 0; first < 4096; first += 512) {  // neighbours
    const int64_t lanes = least(512, 4096 - first);
    alignas(64) float sum_1[512];
    alignas(64) float sum_1_part[512];
    alignas(64) double sum_1_total[512];
    #pragma omp simd
    for (int64_t lane = 0; lane < lanes; ++lane) {
      sum_1_total[lane] = 0;
    }
    for (int64_t block = 0; block < 4096; block += 128) {
      #pragma omp simd
      for (int64_t lane = 0; lane < lanes; ++lane) {
        sum_1_part[lane] = 0;
      }
      for (int64_t j = block; j < least(4096, block + 128); ++j) {
        #pragma omp simd
        for (int64_t lane = 0; lane < lanes; ++lane) {
          const int64_t i = first + lane;
          const float mul = arg0_1[i + j * 4096] * 2.0f;
          sum_1_part[lane] += mul;
        }
      }
      #pragma omp simd
      for (int64_t lane = 0; lane < lanes; ++lane) {  // short sums into long ones
        const int64_t i = first + lane;
        sum_1_total[lane] += sum_1_part[lane];
      }
    }
    #pragma omp simd
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int64_t i = first + lane;
      sum_1[lane] = sum_1_total[lane];
    }
    #pragma omp simd
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int64_t i = first + lane;
      sum_1_out[i] = sum_1[lane];
    }
  }
}
