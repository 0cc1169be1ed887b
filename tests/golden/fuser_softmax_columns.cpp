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
    alignas(64) float amax_acc[16][256];
    alignas(64) float amax_total[256];
    #pragma omp simd
    for (int64_t lane = 0; lane < lanes; ++lane) {
      amax_total[lane] = lowest<float>();
    }
    for (int64_t block = 0; block < 512; block += 256) {
      for (int64_t k = 0; k < 16; ++k) {
        #pragma omp simd
        for (int64_t lane = 0; lane < lanes; ++lane) {
          amax_acc[k][lane] = lowest<float>();
        }
      }
      {
        int64_t group = block;
        for (; group + 64 <= min_i64(512, block + 256); group += 64) {
          for (int64_t first = group; first < group + 16; ++first) {
            #pragma omp simd
            for (int64_t lane = 0; lane < lanes; ++lane) {
              const int64_t i = lane0 + lane;
              #pragma GCC unroll 4
              for (int64_t j = first; j < first + 64; j += 16) {
                amax_acc[first & 15][lane] = nan_max(amax_acc[first & 15][lane], arg0_1[i + j * 1024]);
              }
            }
          }
        }
      }
      #pragma omp simd
      for (int64_t lane = 0; lane < lanes; ++lane) {  // accumulators combined in halves
        const int64_t i = lane0 + lane;
        amax_total[lane] = nan_max(amax_total[lane], nan_max(nan_max(nan_max(nan_max(amax_acc[0][lane], amax_acc[8][lane]), nan_max(amax_acc[4][lane], amax_acc[12][lane])), nan_max(nan_max(amax_acc[2][lane], amax_acc[10][lane]), nan_max(amax_acc[6][lane], amax_acc[14][lane]))), nan_max(nan_max(nan_max(amax_acc[1][lane], amax_acc[9][lane]), nan_max(amax_acc[5][lane], amax_acc[13][lane])), nan_max(nan_max(amax_acc[3][lane], amax_acc[11][lane]), nan_max(amax_acc[7][lane], amax_acc[15][lane])))));
      }
    }
    #pragma omp simd
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int64_t i = lane0 + lane;
      amax[lane] = amax_total[lane];
    }
    alignas(64) float sum_1[256];
    alignas(64) float sum_1_acc[16][256];
    alignas(64) double sum_1_total[256];
    #pragma omp simd
    for (int64_t lane = 0; lane < lanes; ++lane) {
      sum_1_total[lane] = 0;
    }
    for (int64_t block = 0; block < 512; block += 256) {
      for (int64_t k = 0; k < 16; ++k) {
        #pragma omp simd
        for (int64_t lane = 0; lane < lanes; ++lane) {
          sum_1_acc[k][lane] = 0;
        }
      }
      for (int64_t j = block; j < min_i64(512, block + 256); ++j) {  // pass 2
        #pragma omp simd
        for (int64_t lane = 0; lane < lanes; ++lane) {
          const int64_t i = lane0 + lane;
          const float sub = arg0_1[i + j * 1024] - amax[lane];
          const float exp_ = exp(sub);
          exp__buffer[j][lane] = exp_;
          sum_1_acc[j & 15][lane] += exp_;
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
