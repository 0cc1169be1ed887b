// sum_1[] = sum_r0,r1 arg0_1[r0,r1]
// rows: 1 x i<16777216, SIMD over i, body split among threads
static void sum_0(const float* __restrict arg0_1, float* __restrict sum_1_out, int64_t* error, int max_threads) {
  const int num_threads = max_threads;
  const int64_t blocks = (16777216 + 255) / 256;  // of a row
  float* sum_1_partials = (float*)malloc(sizeof(float) * (1) * blocks);
  #pragma omp parallel num_threads(num_threads)
  {
    const int64_t tid = omp_get_thread_num(), started = omp_get_num_threads();
    const int64_t chunks = (16777216 + 1023) / 1024;
    const int64_t begin = tid * chunks / started * 1024, end = min_i64((tid + 1) * chunks / started * 1024, 16777216);  // this thread's part of every row
    for (int64_t block = begin; block < end; block += 1024) {
      reduce_blocks<Sum>(arg0_1 + block, min_i64(1024, end - block), &sum_1_partials[block / 256]);
    }
    #pragma omp barrier
    double sum_1_combined = 0;
    for (int64_t t = 0; t < blocks; ++t) sum_1_combined += sum_1_partials[t];
    const float sum_1 = sum_1_combined;
    if (tid == 0) {
      sum_1_out[0] = sum_1;
    }
  }
  free(sum_1_partials);
}
