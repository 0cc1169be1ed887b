// embedding[i0,i1,i2] = arg1_1[arg0_1[i0,i1],i2]
// mul[i0,i1,i2] = (embedding[i0,i1,i2] * 3.0)
// pointwise: i<64 j<100 x k<512, SIMD over k
static void embedding_0(const float* __restrict arg1_1, const int64_t* __restrict arg0_1, float* __restrict mul_out, int64_t* error, int max_threads) {
  #pragma omp parallel for collapse(2) schedule(static) num_threads(max_threads)
  for (int64_t i = 0; i < 64; ++i) {
    for (int64_t j = 0; j < 100; ++j) {
      const int64_t index1_ = check_index(arg0_1[i * 100 + j], 5000, error);
      #pragma omp simd
      for (int64_t k = 0; k < 512; ++k) {
        const float embedding = arg1_1[k + index1_ * 512];
        const float mul = embedding * 3.0f;
        mul_out[i * 51200 + j * 512 + k] = mul;
      }
    }
  }
}
