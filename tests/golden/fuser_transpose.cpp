// add[i0,i1] = (arg0_1[i1,i0] + 1.0)
// clone[i0,i1] = add[i0,i1]
// transpose: 1 x i<2000 j<1000, SIMD over j, blocks of 64
static void add_clone_0(const float* __restrict arg0_1, float* __restrict clone_out, int64_t* error, int max_threads) {
  #pragma omp parallel for collapse(2) schedule(static) num_threads(max_threads)
  for (int64_t j0 = 0; j0 < 1000; j0 += 64) {
    for (int64_t i0 = 0; i0 < 2000; i0 += 64) {  // tiles
      const int64_t i1 = min_i64(i0 + 64, 2000);
      const int64_t j1 = min_i64(j0 + 64, 1000);
      alignas(64) float arg0_1_tile[64][80];
      prefetch_rows(arg0_1 + i0 + j0 * 2000 + 64, 2000, 64, j1 - j0);  // next tile
      transpose_tile(arg0_1 + i0 + j0 * 2000, 2000, &arg0_1_tile[0][0], 80, i1 - i0, j1 - j0);
      for (int64_t i = i0; i < i1; ++i) {
        #pragma omp simd
        for (int64_t j = j0; j < j1; ++j) {
          const float add = arg0_1_tile[i - i0][j - j0] + 1.0f;
          clone_out[i * 1000 + j] = add;
        }
      }
    }
  }
}
