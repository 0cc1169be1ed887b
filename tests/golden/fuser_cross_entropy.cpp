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
  const int64_t rows = 512;
  const int64_t chunk_rows = rows / 8 < 8 ? 8 : min_i64(rows / 8, 64);
  const int64_t chunks = (rows + chunk_rows - 1) / chunk_rows;
  double* sum_3_partials = (double*)malloc(sizeof(double) * (chunks + 1));
  int64_t* sum_2_partials = (int64_t*)malloc(sizeof(int64_t) * (chunks + 1));
  #pragma omp parallel for schedule(static) num_threads(max_threads)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    double sum_3_partial = 0;
    int64_t sum_2_partial = 0;
    const int64_t rows_end = min_i64(rows, (chunk + 1) * chunk_rows);
    for (int64_t i = chunk * chunk_rows; i < rows_end; ++i) {
      const bool ne_2 = arg1_1[i] != (-100l);
      sum_2_partial += (int64_t)ne_2;
      float amax_total = lowest<float>();
      amax_total = combine_blocks<Maximum>(amax_total, arg0_1 + i * 1000 + 0, 1000);
      const float amax = amax_total;
      double sum_1_total = 0;
      alignas(64) float sum_1_values[1000];
      #pragma omp simd
      for (int64_t j = 0; j < 1000; ++j) {  // pass 2
        const float sub_at2 = arg0_1[i * 1000 + j] - amax;
        const float exp_ = exp(sub_at2);
        sum_1_values[j] = exp_;
      }
      sum_1_total = combine_blocks<Sum>(sum_1_total, sum_1_values, 1000);
      const float sum_1 = sum_1_total;
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
    sum_3_partials[chunk] = sum_3_partial;
    sum_2_partials[chunk] = sum_2_partial;
  }
  double sum_3_total = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) sum_3_total += sum_3_partials[chunk];
  const float sum_3 = sum_3_total;
  int64_t sum_2_total = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) sum_2_total += sum_2_partials[chunk];
  const int64_t sum_2 = sum_2_total;
  const float _to_copy = (float)sum_2;
  const float div = sum_3 / _to_copy;
  div_out[0] = div;
  free(sum_3_partials);
  free(sum_2_partials);
}
