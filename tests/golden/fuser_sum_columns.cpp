// mul[i0,i1] = (arg0_1[i0,i1] * 2.0)
// sum_1[i1] = sum_r0 mul[r0,i1]
// columns: i<4096 x j<4096, SIMD over i, blocks of 4096, body split among threads
static void sum_0(const float* __restrict arg0_1, float* __restrict sum_1_out, int64_t* bad, int threads) {
  const int team = threads;
  float* sum_1_parts = (float*)malloc(sizeof(float) * team * (4096));
  #pragma omp parallel for num_threads(team) schedule(static)
  for (int64_t chunk = 0; chunk < team; ++chunk) {  // a part of the body
    const int64_t from = chunk * 1024 / team * 4, to = (chunk + 1) * 1024 / team * 4;
    for (int64_t first = 0; first < 4096; first += 4096) {  // neighbours
      const int64_t lanes = 4096;
      alignas(64) float sum_1[4096];
      alignas(64) float sum_1_part[4096];
      alignas(64) double sum_1_total[4096];
      #pragma omp simd
      for (int64_t lane = 0; lane < lanes; ++lane) {
        sum_1_total[lane] = 0;
      }
      for (int64_t block = from; block < to; block += 128) {
        #pragma omp simd
        for (int64_t lane = 0; lane < lanes; ++lane) {
          sum_1_part[lane] = 0;
        }
        for (int64_t group = block; group < least(to, block + 128); group += 4) {
          #pragma omp simd
          for (int64_t lane = 0; lane < lanes; ++lane) {
            const int64_t i = first + lane;
            #pragma GCC unroll 4
            for (int64_t j = group; j < group + 4; ++j) {
              const float mul = arg0_1[i + j * 4096] * 2.0f;
              sum_1_part[lane] += mul;
            }
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
        sum_1_parts[chunk * (4096) + i] = sum_1[lane];
      }
    }
  }
  for (int64_t first = 0; first < 4096; first += 4096) {  // neighbours
    const int64_t lanes = 4096;
    alignas(64) float sum_1[4096];
    #pragma omp simd
    for (int64_t lane = 0; lane < lanes; ++lane) {  // the parts together
      const int64_t i = first + lane;
      sum_1[lane] = sum_1_parts[i];
      for (int t = 1; t < team; ++t) sum_1[lane] += sum_1_parts[t * (4096) + i];
    }
    #pragma omp simd
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int64_t i = first + lane;
      sum_1_out[i] = sum_1[lane];
    }
  }
  free(sum_1_parts);
}
