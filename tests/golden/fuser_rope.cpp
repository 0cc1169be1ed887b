// mul[i0,i1,i2,i3] = (arg0_1[i0,i1,i2,i3] * arg1_1[i2,i3])
// neg[i0,i1,i2,i3] = -arg0_1[i0,i1,i2,i3+32]
// cat[i0,i1,i2,i3] = where(0 <= i3 < 32, neg[i0,i1,i2,i3], arg0_1[i0,i1,i2,i3-32])
// mul_1[i0,i1,i2,i3] = (cat[i0,i1,i2,i3] * arg2_1[i2,i3])
// add[i0,i1,i2,i3] = (mul[i0,i1,i2,i3] + mul_1[i0,i1,i2,i3])
// pointwise: i<16 j<128 x k<64, SIMD over k, 2 pieces of a row
static void neg_cat_0(const float* __restrict arg1_1, const float* __restrict arg0_1, const float* __restrict arg2_1, float* __restrict add_out, int64_t* error, int max_threads) {
  #pragma omp parallel for collapse(2) schedule(static) num_threads(choose_num_threads(131072, 18724, max_threads))
  for (int64_t i = 0; i < 16; ++i) {
    for (int64_t j = 0; j < 128; ++j) {
      {
        #pragma omp simd
        for (int64_t k = 0; k < 32; ++k) {
          const float mul = arg0_1[i * 8192 + j * 64 + k] * arg1_1[j * 64 + k];
          const float cat = -arg0_1[i * 8192 + j * 64 + k + 32];
          const float mul_1 = cat * arg2_1[j * 64 + k];
          const float add = mul + mul_1;
          add_out[i * 8192 + j * 64 + k] = add;
        }
      }
      {
        #pragma omp simd
        for (int64_t k = 0; k < 32; ++k) {
          const float mul = arg0_1[i * 8192 + j * 64 + k + 32] * arg1_1[j * 64 + k + 32];
          const float cat = arg0_1[i * 8192 + j * 64 + k];
          const float mul_1 = cat * arg2_1[j * 64 + k + 32];
          const float add = mul + mul_1;
          add_out[i * 8192 + j * 64 + k + 32] = add;
        }
      }
    }
  }
}
