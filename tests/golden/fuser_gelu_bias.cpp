// add[i0,i1] = (arg0_1[i0,i1] + arg1_1[i1])
// gelu[i0,i1] = ((0.5 * add[i0,i1]) * (1.0 + tanh((0.7978845608028654 * (add[i0,i1] + (0.044715 * ((add[i0,i1] * add[i0,i1]) * add[i0,i1])))))))
// pointwise: i<4096 x j<1024, SIMD over j
static void gelu_0(const float* __restrict arg1_1, const float* __restrict arg0_1, float* __restrict gelu_out, int64_t* error, int max_threads) {
  #pragma omp parallel for schedule(static) num_threads(max_threads)
  for (int64_t i = 0; i < 4096; ++i) {
    #pragma omp simd
    for (int64_t j = 0; j < 1024; ++j) {
      const float add = arg0_1[i * 1024 + j] + arg1_1[j];
      const float gelu = (0.5f * add) * (1.0f + tanh((0.7978846f * (add + (0.044715f * ((add * add) * add))))));
      gelu_out[i * 1024 + j] = gelu;
    }
  }
}
