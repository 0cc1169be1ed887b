// sum_1[] = sum_r0,r1 arg0_1[r0,r1]
// rows: 1 x i<16777216, SIMD over i, body split among threads
static void sum_0(const float* __restrict arg0_1, float* __restrict sum_1_out, int64_t* error, int max_threads) {
  const int num_threads = max_threads;
  double* sum_1_partials = (double*)malloc(sizeof(double) * num_threads);
  #pragma omp parallel num_threads(num_threads)
  {
    const int64_t tid = omp_get_thread_num(), started = omp_get_num_threads();
    const int64_t begin = tid * 16777216 / started, end = (tid + 1) * 16777216 / started;  // this thread's part of every row
    double sum_1_total = 0;
    for (int64_t block = begin; block < end; block += 4096) {
      float sum_1_acc = 0;
      #pragma omp simd reduction(+:sum_1_acc)
      for (int64_t i = block; i < min_i64(end, block + 4096); ++i) {
        sum_1_acc += arg0_1[i];
      }
      sum_1_total += sum_1_acc;
    }
    sum_1_partials[tid] = sum_1_total;
    #pragma omp barrier
    double sum_1_combined = sum_1_partials[0];
    for (int64_t t = 1; t < started; ++t) sum_1_combined += sum_1_partials[t];
    const float sum_1 = sum_1_combined;
    if (tid == 0) {
      sum_1_out[0] = sum_1;
    }
  }
  free(sum_1_partials);
}
