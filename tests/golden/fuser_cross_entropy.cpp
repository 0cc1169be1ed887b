// amax[i0] = max_r1 arg0_1[i0,r1]
// sub[i0,i1] = (arg0_1[i0,i1] - amax[i0])
// exp[i0,i1] = exp(sub[i0,i1])
// sum_1[i0] = sum_r1 exp[i0,r1]
// log[i0] = log(sum_1[i0])
// sub_1[i0,i1] = (sub[i0,i1] - log[i0])
// ne[i0] = (arg1_1[i0] != -100)
// scalar_tensor[] = 0
// where[i0] = where(ne[i0], arg1_1[i0], scalar_tensor[])
// gather[i0] = sub_1[i0,where[i0]]
// neg[i0] = -gather[i0]
// ne_1[i0] = (arg1_1[i0] != -100)
// scalar_tensor_1[] = 0.0
// where_1[i0] = where(ne_1[i0], neg[i0], scalar_tensor_1[])
// ne_2[i0] = (arg1_1[i0] != -100)
// sum_2[] = sum_r0 int64(ne_2[r0])
// _to_copy[] = float32(sum_2[])
// sum_3[] = sum_r0 where_1[r0]
// div[] = (sum_3[] / _to_copy[])
// rows: i<512 x j<1000, SIMD over j, 2 passes
static void amax_exp_sum_0(const int64_t* __restrict arg1_1, const float* __restrict arg0_1, float* __restrict div_out, int64_t* error, int max_threads) {
  const int num_threads = max_threads;
  double* sum_3_partials = (double*)malloc(sizeof(double) * num_threads);
  for (int64_t c = 0; c < num_threads; ++c) sum_3_partials[c] = 0;
  int64_t* sum_2_partials = (int64_t*)malloc(sizeof(int64_t) * num_threads);
  for (int64_t c = 0; c < num_threads; ++c) sum_2_partials[c] = 0;
  #pragma omp parallel num_threads(num_threads)
  {
    const int tid = omp_get_thread_num();
    double sum_3_partial = 0;
    int64_t sum_2_partial = 0;
    #pragma omp for schedule(static)
    for (int64_t i = 0; i < 512; ++i) {
      const bool ne_2 = arg1_1[i] != (-100l);
      sum_2_partial += (int64_t)ne_2;
      float amax = lowest<float>();
      #pragma omp simd reduction(nan_max:amax)
      for (int64_t j = 0; j < 1000; ++j) {  // pass 1
        amax = nan_max(amax, arg0_1[i * 1000 + j]);
      }
      float sum_1 = 0;
      #pragma omp simd reduction(+:sum_1)
      for (int64_t j = 0; j < 1000; ++j) {  // pass 2
        const float sub_at2 = arg0_1[i * 1000 + j] - amax;
        const float exp_ = exp(sub_at2);
        sum_1 += exp_;
      }
      const bool ne_1 = arg1_1[i] != (-100l);
      const bool ne = arg1_1[i] != (-100l);
      const int64_t where = select(ne, arg1_1[i], 0l);
      const float sub = arg0_1[i * 1000 + check_index(where, 1000, error)] - amax;
      const float log_ = log(sum_1);
      const float sub_1 = sub - log_;
      const float neg = -sub_1;
      const float where_1 = ne_1 ? neg : 0.0f;
      sum_3_partial += where_1;
    }
    sum_3_partials[tid] = sum_3_partial;
    sum_2_partials[tid] = sum_2_partial;
  }
  double sum_3_total = sum_3_partials[0];
  for (int t = 1; t < num_threads; ++t) sum_3_total += sum_3_partials[t];
  const float sum_3 = sum_3_total;
  int64_t sum_2_total = sum_2_partials[0];
  for (int t = 1; t < num_threads; ++t) sum_2_total += sum_2_partials[t];
  const int64_t sum_2 = sum_2_total;
  const float _to_copy = (float)sum_2;
  const float div = sum_3 / _to_copy;
  div_out[0] = div;
  free(sum_3_partials);
  free(sum_2_partials);
}
