// sum_1[] = sum_r0,r1 arg0_1[r0,r1]
// rows: 1 x i<16777216, SIMD over i, body split among threads
static void sum_0(const float* __restrict arg0_1, float* __restrict sum_1_out, int64_t* bad, int threads) {
  const int team = threads;
  double* sum_1_parts = (double*)malloc(sizeof(double) * team);
  #pragma omp parallel num_threads(team)
  {
    const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
    const int64_t from = me * 16777216 / all, to = (me + 1) * 16777216 / all;  // its part of every row
    double sum_1_total = 0;
    for (int64_t block = from; block < to; block += 4096) {
      float sum_1_some = 0;
      #pragma omp simd reduction(+:sum_1_some)
      for (int64_t i = block; i < least(to, block + 4096); ++i) {
        sum_1_some += arg0_1[i];
      }
      sum_1_total += sum_1_some;
    }
    sum_1_parts[me] = sum_1_total;
    #pragma omp barrier
    double sum_1_all = sum_1_parts[0];
    for (int64_t t = 1; t < all; ++t) sum_1_all += sum_1_parts[t];
    const float sum_1 = sum_1_all;
    if (me == 0) {
      sum_1_out[0] = sum_1;
    }
  }
  free(sum_1_parts);
}
