// mul[i0,i1] = (arg0_1[i0,i1] * 2.0)
// sum_1[i1] = sum_r0 mul[r0,i1]
// columns: i<4096 x j<4096, SIMD over i, blocks of 4096, body split among threads
static void sum_0(const float* __restrict arg0_1, float* __restrict sum_1_out, int64_t* error, int max_threads) {
  const int num_threads = max_threads;
  float* sum_1_partials = (float*)malloc(sizeof(float) * num_threads * (4096));
  #pragma omp parallel for schedule(static) num_threads(num_threads)
  for (int64_t chunk = 0; chunk < num_threads; ++chunk) {  // one chunk of the body
    const int64_t begin = chunk * 1024 / num_threads * 4, end = (chunk + 1) * 1024 / num_threads * 4;
    for (int64_t lane0 = 0; lane0 < 4096; lane0 += 4096) {  // block of lanes
      const int64_t lanes = 4096;
      alignas(64) float sum_1[4096];
      alignas(64) float sum_1_acc[4096];
      alignas(64) double sum_1_total[4096];
      #pragma omp simd
      for (int64_t lane = 0; lane < lanes; ++lane) {
        sum_1_total[lane] = 0;
      }
      for (int64_t block = begin; block < end; block += 128) {
        #pragma omp simd
        for (int64_t lane = 0; lane < lanes; ++lane) {
          sum_1_acc[lane] = 0;
        }
        for (int64_t group = block; group < min_i64(end, block + 128); group += 4) {
          #pragma omp simd
          for (int64_t lane = 0; lane < lanes; ++lane) {
            const int64_t i = lane0 + lane;
            #pragma GCC unroll 4
            for (int64_t j = group; j < group + 4; ++j) {
              const float mul = arg0_1[i + j * 4096] * 2.0f;
              sum_1_acc[lane] += mul;
            }
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
      #pragma omp simd
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const int64_t i = lane0 + lane;
        sum_1_partials[chunk * (4096) + i] = sum_1[lane];
      }
    }
  }
  for (int64_t lane0 = 0; lane0 < 4096; lane0 += 4096) {  // block of lanes
    const int64_t lanes = 4096;
    alignas(64) float sum_1[4096];
    #pragma omp simd
    for (int64_t lane = 0; lane < lanes; ++lane) {  // combine the partials of all threads
      const int64_t i = lane0 + lane;
      sum_1[lane] = sum_1_partials[i];
      for (int t = 1; t < num_threads; ++t) sum_1[lane] += sum_1_partials[t * (4096) + i];
    }
    #pragma omp simd
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int64_t i = lane0 + lane;
      sum_1_out[i] = sum_1[lane];
    }
  }
  free(sum_1_partials);
}
