// mul[i0,i1] = (arg0_1[i0,i1] * 2.0)
// sum_1[i1] = sum_r0 mul[r0,i1]
// columns: i<4096 x j<4096, SIMD over i, blocks of 512
static void sum_0(const float* __restrict arg0_1, float* __restrict sum_1_out, int64_t* error, int max_threads) {
  #pragma omp parallel for schedule(static) num_threads(max_threads)
  for (int64_t lane0 = 0; lane0 < 4096; lane0 += 512) {  // block of lanes
    const int64_t lanes = 512;
    alignas(64) float sum_1[512];
    alignas(64) float sum_1_acc[16][512];
    alignas(64) double sum_1_total[512];
    #pragma omp simd
    for (int64_t lane = 0; lane < lanes; ++lane) {
      sum_1_total[lane] = 0;
    }
    for (int64_t block = 0; block < 4096; block += 256) {
      for (int64_t k = 0; k < 16; ++k) {
        #pragma omp simd
        for (int64_t lane = 0; lane < lanes; ++lane) {
          sum_1_acc[k][lane] = 0;
        }
      }
      {
        int64_t group = block;
        for (; group + 64 <= min_i64(4096, block + 256); group += 64) {
          for (int64_t first = group; first < group + 16; ++first) {
            #pragma omp simd
            for (int64_t lane = 0; lane < lanes; ++lane) {
              const int64_t i = lane0 + lane;
              #pragma GCC unroll 4
              for (int64_t j = first; j < first + 64; j += 16) {
                const float mul = arg0_1[i + j * 4096] * 2.0f;
                sum_1_acc[first & 15][lane] += mul;
              }
            }
          }
        }
      }
      #pragma omp simd
      for (int64_t lane = 0; lane < lanes; ++lane) {  // accumulators combined in halves
        const int64_t i = lane0 + lane;
        sum_1_total[lane] += ((((sum_1_acc[0][lane] + sum_1_acc[8][lane]) + (sum_1_acc[4][lane] + sum_1_acc[12][lane])) + ((sum_1_acc[2][lane] + sum_1_acc[10][lane]) + (sum_1_acc[6][lane] + sum_1_acc[14][lane]))) + (((sum_1_acc[1][lane] + sum_1_acc[9][lane]) + (sum_1_acc[5][lane] + sum_1_acc[13][lane])) + ((sum_1_acc[3][lane] + sum_1_acc[11][lane]) + (sum_1_acc[7][lane] + sum_1_acc[15][lane]))));
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
      sum_1_out[i] = sum_1[lane];
    }
  }
}
