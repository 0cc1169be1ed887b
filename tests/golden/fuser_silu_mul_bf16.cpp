// silu[i0,i1] = (arg0_1[i0,i1] / (1.0 + exp(-arg0_1[i0,i1])))
// mul[i0,i1] = (silu[i0,i1] * arg1_1[i0,i1])
// pointwise: 1 x i<4194304, SIMD over i
static void silu_0(const bf16* __restrict arg0_1, const bf16* __restrict arg1_1, bf16* __restrict mul_out, int64_t* error, int max_threads) {
  #pragma omp parallel for simd schedule(static) num_threads(max_threads)
  for (int64_t i = 0; i < 4194304; ++i) {
    const float silu = widen(arg0_1[i]) / (1.0f + exp((-widen(arg0_1[i]))));
    const float mul = silu * widen(arg1_1[i]);
    store(mul_out + i, mul);
  }
}
